"""One way of stepping 64 FrozenLakes, in a process of its own; prints what it cost as JSON.

`environment` steps the environments one by one and begins the next episode where one ends; `seeded` does the same
with a new seed for each episode, as a server does that can rebuild them; `sync` and `async` are Gymnasium's own vector
environments; `remote` is our client's.
"""

import argparse
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import processes
from gymnasium.vector import AutoresetMode, VectorEnv

from rollgym import RemoteVectorEnv

_WARM_UP_S = 0.5
_ROWS = 1000
_SEEDS = 2**53


def actions(count: int) -> Any:
    """Rows of random actions, the same in every run."""
    return np.random.default_rng(0).integers(4, size=(_ROWS, count))


def alone(env_id: str, count: int, *, seeded: bool) -> Callable[[int], None]:
    """Step environments without anything around them."""
    environments = [gymnasium.make(env_id, disable_env_checker=True) for _ in range(count)]
    for number, environment in enumerate(environments):
        environment.reset(seed=number)
    rows = actions(count).tolist()

    def step(number: int) -> None:
        for environment, action in zip(environments, rows[number % _ROWS], strict=True):
            _, _, terminated, truncated, _ = environment.step(action)
            if terminated or truncated:
                environment.reset(seed=secrets.randbelow(_SEEDS) if seeded else None)

    return step


def vector(envs: VectorEnv[Any, Any, Any]) -> Callable[[int], None]:
    """Step a vector environment."""
    rows = actions(envs.num_envs)
    envs.reset(seed=0)
    return lambda number: envs.step(rows[number % _ROWS]) and None


def measure(step: Callable[[int], None], count: int, seconds: float, pid: int) -> dict[str, float]:
    """Steps a second, and CPU of this process with its children and of the server."""
    _play(step, _WARM_UP_S)
    own, server = processes.cpu_seconds(os.getpid()), processes.cpu_seconds(pid)
    batches, elapsed = _play(step, seconds)
    steps = batches * count
    return {
        "steps_per_s": round(steps / elapsed),
        "server_cpu_us_per_step": round(1e6 * (processes.cpu_seconds(pid) - server) / steps, 2),
        "load_cpu_us_per_step": round(1e6 * (processes.cpu_seconds(os.getpid()) - own) / steps, 2),
    }


def _play(step: Callable[[int], None], seconds: float) -> tuple[int, float]:
    begun = time.perf_counter()
    batches = 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        step(batches)
        batches += 1
    return batches, elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=("environment", "seeded", "sync", "async", "remote"))
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--url", help="the server of `remote`")
    parser.add_argument("--pid", type=int, default=os.getpid(), help="the process whose CPU is the server's")
    options = parser.parse_args()
    envs: VectorEnv[Any, Any, Any] | None = None
    if options.way in ("environment", "seeded"):
        step = alone(options.env_id, options.count, seeded=options.way == "seeded")
    else:
        mode = AutoresetMode.SAME_STEP
        if options.way == "remote":
            envs = RemoteVectorEnv(options.url, options.env_id, options.count, autoreset_mode=mode)
        else:
            envs = gymnasium.make_vec(
                options.env_id,
                options.count,
                vectorization_mode=options.way,
                vector_kwargs={"autoreset_mode": mode},
                disable_env_checker=True,
            )
        step = vector(envs)
    print(json.dumps(measure(step, options.count, options.seconds, options.pid)))
    if envs is not None:
        envs.close()


if __name__ == "__main__":
    main()
