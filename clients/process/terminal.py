"""Text and pictures for a person at a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

_LONGEST_LINE, _SHORTEST_LINE = 100, 20
_OBEYED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Control characters that a terminal obeys in place of showing them, except line ends and tabulators."""


def visible(text: str) -> str:
    """Escape control characters: a foreign text could set the terminal's title, or hide earlier text."""
    return _OBEYED.sub(lambda found: repr(found.group())[1:-1], text)


def wrapped(text: str, width: int | None = None) -> str:
    """Break lines that are longer than the terminal between words; all others, such as a board's, stay as they are.

    Args:
        text: Any lines.
        width: The longest line; the terminal's, and no more than is read with ease, if None.
    """
    if width is None:
        width = min(_LONGEST_LINE, max(_SHORTEST_LINE, shutil.get_terminal_size().columns))
    return "\n".join(_wrap(line, width) for line in text.split("\n"))


def ask(prompt: str) -> str:
    """Write a prompt, and return the line that comes.

    Raises:
        EOFError: The input ended.
    """
    # `input` ignores errors of its output, and with them a termination that arrives at that moment.
    if sys.stdin.isatty():
        sys.stdout.flush()
        return input(prompt)
    sys.stdout.write(prompt)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def is_picture(observation: Any) -> TypeGuard[NDArray[np.uint8]]:
    """Whether an observation is a picture: rows of pixels of three colours, a byte each."""
    return (
        isinstance(observation, np.ndarray)
        and observation.dtype == np.uint8
        and observation.ndim == 3
        and observation.shape[2] == 3
    )


def picture_text(picture: NDArray[np.uint8], *, coloured: bool) -> str:
    """Draw a picture for a terminal, two pixels in a character; without colours, return its size as text.

    Args:
        picture: The pixels, of shape (height, width, 3).
        coloured: Whether the output shows 24-bit colours.
    """
    height, width, _ = picture.shape
    if not coloured or not height or not width:
        return f"a picture of {width} x {height} pixels; a browser shows it, at the server's /console"
    every = -(-width // shutil.get_terminal_size().columns)
    seen = picture[::every, ::every]
    lines = []
    for row in range(0, len(seen), 2):
        below = seen[min(row + 1, len(seen) - 1)]
        pairs = zip(seen[row].tolist(), below.tolist(), strict=True)
        cells = ("\x1b[38;2;{};{};{};48;2;{};{};{}m▀".format(*upper, *lower) for upper, lower in pairs)
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _wrap(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())][: width // 2]
    # Text without spaces, such as a path or a number, stays whole and can be copied.
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
