"""gym-sokoban's levels and steps, for sokoban.py: run by an interpreter that has gym-sokoban 0.0.6, numpy below 2."""

import contextlib
import io
import json
import random
import signal
import sys
import time
import warnings

import numpy as np
from gym_sokoban.envs.sokoban_env import SokobanEnv


class TimeUpError(Exception):
    pass


def up(*_):
    raise TimeUpError


def main():
    rows, columns, boxes, levels, budget_s, steps = map(int, sys.argv[1:])
    random.seed(0)
    np.random.seed(0)
    # CPU time, as all that is measured here.
    signal.signal(signal.SIGPROF, up)
    signal.setitimer(signal.ITIMER_PROF, budget_s)
    times, environment = [], None
    # It prints what it goes through, and retries by itself where a room fails.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            while len(times) < levels:
                begun = time.process_time()
                if environment is None:
                    made = SokobanEnv(
                        dim_room=(rows, columns), num_boxes=boxes, max_steps=steps + 1, reset=False
                    )
                made.reset()
                environment = made
                times.append(time.process_time() - begun)
        except TimeUpError:
            pass
        signal.setitimer(signal.ITIMER_PROF, 0)
        step_us = None
        if environment is not None:
            actions = np.random.randint(1, 5, steps).tolist()
            begun = time.process_time()
            for action in actions:
                environment.step(action, observation_mode="tiny_rgb_array")
            step_us = (time.process_time() - begun) / steps * 1e6
    print(json.dumps({"seconds": times, "step_us": step_us}))


if __name__ == "__main__":
    main()
