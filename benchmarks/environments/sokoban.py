"""What a level and a step of Sokoban cost, in CPU time, beside gym-sokoban's.

    python benchmarks/environments/sokoban.py --out benchmarks/results/sokoban_levels.json

gym-sokoban 0.0.6 needs the old gym and numpy below 2, so it has an environment of its own; without one only ours is
measured:

    python -m venv peer && peer/bin/pip install gym-sokoban==0.0.6 gym==0.26.2 'numpy<2'
    python benchmarks/environments/sokoban.py --peer-python peer/bin/python --out ...

A level of ours is any of split train whose shortest solution is known exactly; a level of gym-sokoban is what a reset
makes, with no word on its solution. A step of ours is a text, one of gym-sokoban a picture with a pixel a cell.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from rollgym.clients.measuring.revision import revision
from rollgym.envs.games.sokoban.board import ACTIONS
from rollgym.envs.games.sokoban.environment import SokobanEnv
from rollgym.envs.games.sokoban.generator import Difficulty, generate

PEER = Path(__file__).parent / "gym_sokoban_peer.py"
# Rows, columns, boxes, fewest moves, levels of ours.
CASES = ((6, 6, 1, 1, 1000), (6, 6, 2, 1, 500), (8, 8, 2, 1, 300), (10, 10, 4, 1, 100), (10, 10, 4, 20, 60))
STEPS = 2_000


def ours(rows, columns, boxes, min_moves, levels):
    """CPU seconds of each level, their moves, and microseconds of a step."""
    times, moves = [], []
    difficulty = Difficulty(rows, columns, boxes, min_moves, None)
    for seed in range(levels):
        generator = np.random.default_rng(seed)
        begun = time.process_time()
        made = generate(generator, difficulty, "train")
        if made is not None and made.optimal_moves is not None:
            moves.append(made.optimal_moves)
        times.append(time.process_time() - begun)
    environment = SokobanEnv(
        size=(rows, columns), boxes=boxes, min_moves=min_moves, max_episode_steps=STEPS + 1
    )
    environment.reset(seed=0)
    actions = np.random.default_rng(0).integers(4, size=STEPS).tolist()
    begun = time.process_time()
    for action in actions:
        environment.step(ACTIONS[action])
    step_us = (time.process_time() - begun) / STEPS * 1e6
    quartiles = np.percentile(moves, [0, 50, 100]).tolist()
    return summary(times, step_us) | {"moves_least_median_most": quartiles}


def peers(python, rows, columns, boxes, levels, budget_s):
    """The same of gym-sokoban, as many levels as come in time."""
    arguments = [rows, columns, boxes, levels, budget_s, STEPS]
    done = subprocess.run(
        [python, str(PEER), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    return summary(found["seconds"], found["step_us"]) | {"budget_s": budget_s}


def summary(times, step_us):
    """Levels made, their times in milliseconds, and the time of a step in microseconds."""
    if not times:
        return {"levels": 0}
    ordered = sorted(1000 * each for each in times)
    return {
        "levels": len(ordered),
        "level_ms_median": round(statistics.median(ordered), 2),
        "level_ms_p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2),
        "level_ms_most": round(ordered[-1], 2),
        "step_us": round(step_us, 1),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="an interpreter with gym-sokoban")
    parser.add_argument("--peer-levels", type=int, default=20)
    parser.add_argument("--peer-budget-s", type=int, default=60, help="CPU seconds for each size")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = []
    for rows, columns, boxes, min_moves, levels in CASES:
        row = {"size": f"{rows}x{columns}", "boxes": boxes, "min_moves": min_moves}
        row["rollgym"] = ours(rows, columns, boxes, min_moves, levels)
        if options.peer_python and min_moves == 1:
            row["gym-sokoban"] = peers(
                options.peer_python, rows, columns, boxes, options.peer_levels, options.peer_budget_s
            )
        print(json.dumps(row))
        table.append(row)
    commit = revision()
    result = {
        "command": "python benchmarks/environments/sokoban.py --peer-python peer/bin/python",
        "commit": commit,
        "load_average": round(os.getloadavg()[0], 2),
        "cases": table,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
