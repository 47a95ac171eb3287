"""What our clients cost: CPU time a step of the process that uses them, with actions and episodes as everywhere here.

`--way` is `async` (one task for each session), `sync` (a Gymnasium environment) or `batch` (a vector environment).
"""

import argparse
import asyncio
import json
import time
from typing import Any

import uvloop

from rollgym import EnvClient, EnvSession, RemoteEnv, RemoteVectorEnv

ENV_ID, ACTION = "FrozenLake-v0", "<answer>Left</answer>"
_WARM_UP_S = 0.5


async def many(url: str, sessions: int, seconds: float) -> dict[str, Any]:
    async def play(session: EnvSession, seed: int) -> None:
        nonlocal steps
        await session.reset(seed=seed)
        while time.perf_counter() < end:
            _, _, terminated, truncated, _ = await session.step(ACTION)
            steps += 1
            if terminated or truncated:
                await session.reset(seed=seed)

    async with EnvClient(url) as client:
        made = await client.make_many(ENV_ID, sessions)
        steps, end = 0, time.perf_counter() + _WARM_UP_S
        await asyncio.gather(*(play(session, seed) for seed, session in enumerate(made)))
        steps, cpu, begun = 0, time.process_time(), time.perf_counter()
        end = begun + seconds
        await asyncio.gather(*(play(session, seed) for seed, session in enumerate(made)))
        return result(steps, time.process_time() - cpu, time.perf_counter() - begun)


def one(url: str, seconds: float) -> dict[str, Any]:
    env = RemoteEnv(url, ENV_ID)

    def play(end: float) -> int:
        env.reset(seed=0)
        steps = 0
        while time.perf_counter() < end:
            _, _, terminated, truncated, _ = env.step(ACTION)
            steps += 1
            if terminated or truncated:
                env.reset(seed=0)
        return steps

    play(time.perf_counter() + _WARM_UP_S)
    cpu, begun = time.process_time(), time.perf_counter()
    steps = play(begun + seconds)
    found = result(steps, time.process_time() - cpu, time.perf_counter() - begun)
    env.close()
    return found


def vector(url: str, sessions: int, seconds: float) -> dict[str, Any]:
    envs = RemoteVectorEnv(url, ENV_ID, num_envs=sessions, autoreset_mode="SameStep")
    envs.reset(seed=0)

    def play(end: float) -> int:
        steps = 0
        while time.perf_counter() < end:
            envs.step([ACTION] * sessions)
            steps += sessions
        return steps

    play(time.perf_counter() + _WARM_UP_S)
    cpu, begun = time.process_time(), time.perf_counter()
    steps = play(begun + seconds)
    found = result(steps, time.process_time() - cpu, time.perf_counter() - begun)
    envs.close()
    return found


def result(steps: int, cpu: float, seconds: float) -> dict[str, Any]:
    return {"steps_per_s": round(steps / seconds), "client_cpu_us_per_step": round(1e6 * cpu / steps, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--way", choices=("async", "sync", "batch"), required=True)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    if options.way == "async":
        print(json.dumps(uvloop.run(many(options.url, options.sessions, options.seconds))))
    elif options.way == "sync":
        print(json.dumps(one(options.url, options.seconds)))
    else:
        print(json.dumps(vector(options.url, options.sessions, options.seconds)))
