"""What OpenEnv's own client costs, as `own_client.py`; it has one socket for each session and no batches."""

import argparse
import asyncio
import json
import time
from typing import Any

import uvloop
from openenv.core import GenericEnvClient

ACTION = {"action": "<answer>Left</answer>"}
_WARM_UP_S = 0.5


async def many(url: str, sessions: int, seconds: float) -> dict[str, Any]:
    async def play(client: GenericEnvClient, seed: int) -> None:
        nonlocal steps
        await client.reset(seed=seed)
        while time.perf_counter() < end:
            answer = await client.step(ACTION)
            steps += 1
            if answer.done:
                await client.reset(seed=seed)

    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    await asyncio.gather(*(client.connect() for client in clients))
    steps, end = 0, time.perf_counter() + _WARM_UP_S
    await asyncio.gather(*(play(client, seed) for seed, client in enumerate(clients)))
    steps, cpu, begun = 0, time.process_time(), time.perf_counter()
    end = begun + seconds
    await asyncio.gather(*(play(client, seed) for seed, client in enumerate(clients)))
    found = result(steps, time.process_time() - cpu, time.perf_counter() - begun)
    await asyncio.gather(*(client.close() for client in clients))
    return found


def one(url: str, seconds: float) -> dict[str, Any]:
    def play(end: float) -> int:
        client.reset(seed=0)
        steps = 0
        while time.perf_counter() < end:
            steps += 1
            if client.step(ACTION).done:
                client.reset(seed=0)
        return steps

    with GenericEnvClient(base_url=url).sync() as client:
        play(time.perf_counter() + _WARM_UP_S)
        cpu, begun = time.process_time(), time.perf_counter()
        steps = play(begun + seconds)
        return result(steps, time.process_time() - cpu, time.perf_counter() - begun)


def result(steps: int, cpu: float, seconds: float) -> dict[str, Any]:
    return {"steps_per_s": round(steps / seconds), "client_cpu_us_per_step": round(1e6 * cpu / steps, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--way", choices=("async", "sync"), required=True)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    if options.way == "async":
        print(json.dumps(uvloop.run(many(options.url, options.sessions, options.seconds))))
    else:
        print(json.dumps(one(options.url, options.seconds)))
