"""Records what gym-sokoban 0.0.6 does.

    PYTHON peers/games/record_sokoban.py > tests/envs/games/recorded/sokoban.json

Run it in an environment of its own, which needs `gym-sokoban`, `gym==0.26.2` and `numpy`; ours has none of them.
Levels are gym-sokoban's own, actions random. Every trace keeps the first board, the moves, and for each step reward and
board, so that one step that differs is found where it happens.
"""

import json
import random
import sys

import numpy as np
from gym_sokoban.envs.sokoban_env import SokobanEnv

# (fixed part, state) of a cell -> XSB.
CELLS = {
    (0, 0): "#",
    (1, 1): " ",
    (2, 2): ".",
    (1, 3): "*",
    (2, 3): "*",
    (1, 4): "$",
    (2, 4): "$",
    (1, 5): "@",
    (2, 5): "+",
}
MOVES = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}


class Quiet(SokobanEnv):
    """Without pictures, which cost more than the game."""

    def render(self, *_args, **_kwargs):
        return None


def board(env):
    return "\n".join(
        "".join(CELLS[int(fixed), int(state)] for fixed, state in zip(*rows, strict=True))
        for rows in zip(env.room_fixed, env.room_state, strict=True)
    )


def trace(boxes, size, limit):
    env = Quiet(dim_room=(size, size), max_steps=limit, num_boxes=boxes)
    first, steps, done = board(env), [], False
    while not done:
        action = random.choice(list(MOVES))
        _, reward, done, _ = env.step(action)
        steps.append([MOVES[action], round(float(reward), 6), board(env)])
    return {
        "level": first,
        "limit": limit,
        "solved": bool(env._check_if_all_boxes_on_target()),
        "steps": steps,
    }


if __name__ == "__main__":
    random.seed(0)
    np.random.seed(0)
    traces = [
        trace(boxes, size, limit)
        for boxes in (1, 1, 2, 3)
        for size, limit in ((6, 15), (6, 40), (7, 40), (8, 60))
    ]
    json.dump(traces, sys.stdout, indent=None, separators=(",", ":"))
