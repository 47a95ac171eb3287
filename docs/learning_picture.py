"""Draws how one policy plays FrozenLake before and after it is trained, as an animated GIF.

    roll-train --config examples/frozen_lake.yaml checkpoint.keep=9 output_dir=runs/picture
    python docs/learning_picture.py runs/picture

The run has the settings of `make train`, but keeps its checkpoints. The policy after the warm start, and the one that
was trained, play the same maps of the split `test`; every move in the picture is one that was recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "frozen_lake.yaml"
PICTURE = ROOT / "docs" / "images" / "frozen_lake.gif"

_COLUMNS, _ROWS = 6, 4
_CELL, _GAP, _MARGIN, _HEADING = 15, 12, 18, 44
_FRAME_MS, _LAST_MS = 340, 3200
_MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_BACKGROUND, _INK, _QUIET = "#ffffff", "#1d2127", "#646b75"
_ICE, _HOLE, _GOAL, _PLAYER = "#dbeafe", "#1e3a5f", "#fbbf24", "#d1690e"
_SOLVED, _FAILED = "#177a50", "#c2303f"

Place = tuple[int, int]


@dataclass(frozen=True)
class Played:
    """An episode: the rows of its map, where the player stands at every moment, and whether the goal was reached."""

    rows: tuple[str, ...]
    places: tuple[Place, ...]
    solved: bool


def read_episode(record: dict) -> Played:
    """Read an episode as `roll-train rollout --output` writes it."""
    boards = [turn["observation"].split("\n") for turn in record["turns"]]
    places = [_player(board) for board in boards]
    # The last move is followed by no observation.
    down, right = _MOVES.get(record["turns"][-1]["reply"].strip(), (0, 0))
    last = len(boards[0]) - 1
    row, column = places[-1]
    places.append((min(max(row + down, 0), last), min(max(column + right, 0), last)))
    rows = tuple(row.replace("P", "_") for row in boards[0])
    return Played(rows, tuple(places), record["outcome"] == "solved")


def _player(board: Sequence[str]) -> Place:
    return next((row, line.index("P")) for row, line in enumerate(board) if "P" in line)


def draw(panels: Sequence[tuple[str, Sequence[Played]]]) -> list[Image.Image]:
    """Draw every moment of episodes that are played side by side.

    Args:
        panels: A heading, and the episodes below it, for each panel from left to right.
    """
    moments = max(len(episode.places) for _, episodes in panels for episode in episodes)
    side = len(panels[0][1][0].rows) * _CELL
    width = _COLUMNS * (side + _GAP) - _GAP
    size = (
        len(panels) * (width + 2 * _MARGIN),
        _HEADING + _ROWS * (side + _GAP) - _GAP + 2 * _MARGIN,
    )
    frames = []
    for moment in range(moments):
        image = Image.new("RGB", size, _BACKGROUND)
        canvas = ImageDraw.Draw(image)
        for index, (heading, episodes) in enumerate(panels):
            left = index * (width + 2 * _MARGIN) + _MARGIN
            done = sum(each.solved and len(each.places) - 1 <= moment for each in episodes)
            canvas.text((left, 14), heading, _INK, ImageFont.load_default(16))
            canvas.text(
                (left, 36), f"{done} of {len(episodes)} reached the goal", _QUIET, ImageFont.load_default(13)
            )
            for number, episode in enumerate(episodes):
                x = left + number % _COLUMNS * (side + _GAP)
                y = _HEADING + _MARGIN + number // _COLUMNS * (side + _GAP)
                _draw_map(canvas, episode, moment, x, y)
        frames.append(image)
    return frames


def _draw_map(canvas: ImageDraw.ImageDraw, episode: Played, moment: int, x: int, y: int) -> None:
    colours = {"_": _ICE, "O": _HOLE, "G": _GOAL}
    for row, line in enumerate(episode.rows):
        for column, letter in enumerate(line):
            corner = (x + column * _CELL, y + row * _CELL)
            box = (*corner, corner[0] + _CELL - 2, corner[1] + _CELL - 2)
            canvas.rectangle(box, colours.get(letter, _ICE))
    over = moment >= len(episode.places) - 1
    row, column = episode.places[min(moment, len(episode.places) - 1)]
    colour = _PLAYER if not over else _SOLVED if episode.solved else _FAILED
    left, top = x + column * _CELL + 2, y + row * _CELL + 2
    canvas.ellipse((left, top, left + _CELL - 6, top + _CELL - 6), colour)
    if over:
        side = len(episode.rows) * _CELL
        canvas.rectangle((x - 4, y - 4, x + side + 2, y + side + 2), outline=colour, width=2)


def _play(run: Path, checkpoint: Path, output: Path) -> list[Played]:
    command = [
        *(sys.executable, "-m", "rollgym.trainer.cli", "rollout", "--config", str(CONFIG)),
        *("--checkpoint", str(checkpoint), "--evaluation-set", "held_out"),
        *("--episodes", str(_COLUMNS * _ROWS), "--output", str(output), f"output_dir={run}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [read_episode(json.loads(line)) for line in output.read_text().splitlines()]


def main() -> None:
    """Play both policies and write the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "run", type=Path, help="the run's folder, with the checkpoint that the warm start made"
    )
    parser.add_argument("--output", type=Path, default=PICTURE, help="default: docs/images/frozen_lake.gif")
    options = parser.parse_args()
    steps = sorted((options.run / "checkpoints").glob("step_*"))
    if not steps or steps[0].name != "step_000000":
        raise SystemExit(f"{options.run} has no checkpoint of step 0: train it with checkpoint.keep=9")
    with tempfile.TemporaryDirectory() as folder:
        panels = [
            (heading, _play(options.run, step, Path(folder) / f"{step.name}.jsonl"))
            for heading, step in (
                ("Before training", steps[0]),
                (f"After {int(steps[-1].name.removeprefix('step_'))} steps of GiGPO", steps[-1]),
            )
        ]
    frames = draw(panels)
    frames[0].save(
        options.output,
        save_all=True,
        append_images=frames[1:],
        duration=[*[_FRAME_MS] * (len(frames) - 1), _LAST_MS],
        loop=0,
        optimize=True,
    )
    for heading, episodes in panels:
        sys.stdout.write(
            f"{heading}: {sum(each.solved for each in episodes)} of {len(episodes)} reached the goal\n"
        )
    sys.stdout.write(f"{options.output}\n")


if __name__ == "__main__":
    main()
