"""Level files of Sokoban as others write them, made from levels."""

import re
from collections.abc import Iterable

from rollgym.envs.games.sokoban.levels import FileLevel


def format_levels(levels: Iterable[FileLevel], *, run_length: bool = False) -> str:
    """Write levels as a file that `parse_levels` reads.

    Args:
        levels: The levels; their numbers are given anew by their order.
        run_length: Write each as one line of runs, such as `5#|#@$.#|5#`.
    """
    parts = []
    for level in levels:
        heading = "" if level.title is None else f"; {level.title}\n"
        parts.append(f"{heading}{run_lengths(level.text) if run_length else level.text}\n")
    return "\n".join(parts)


def run_lengths(text: str) -> str:
    """Return XSB text as runs: `4#2-` is four walls and two cells of floor, `|` ends a row."""
    joined = text.replace(" ", "-").replace("\n", "|")
    runs = re.finditer(r"(.)\1*", joined)
    return "".join(f"{len(run[0]) if len(run[0]) > 1 else ''}{run[1]}" for run in runs)
