"""What environments take by themselves: makes them as a server does, each after a step, and prints KiB for one."""

import argparse
import gc
import importlib
import json
import os
from typing import Any

import processes
from wire import ACTION

_BEFORE = 50


def made(env_class: Any, kwargs: dict[str, Any], seed: int, steps: int) -> Any:
    """An environment that has taken some steps."""
    environment = env_class(**kwargs)
    environment.reset(seed=seed)
    for _ in range(steps):
        environment.step(ACTION)
    return environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry_point", help="module:Class")
    parser.add_argument("--kwargs", type=json.loads, default={})
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    module, _, name = options.entry_point.partition(":")
    env_class = getattr(importlib.import_module(module), name)
    kept = [made(env_class, options.kwargs, seed, options.steps) for seed in range(_BEFORE)]
    gc.collect()
    before = processes.resident_kib(os.getpid())
    kept += [made(env_class, options.kwargs, seed, options.steps) for seed in range(options.count)]
    gc.collect()
    print(json.dumps(round((processes.resident_kib(os.getpid()) - before) / options.count, 2)))


if __name__ == "__main__":
    main()
