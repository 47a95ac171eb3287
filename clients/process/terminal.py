"""Text for a person at a terminal."""

from __future__ import annotations

import shutil
import textwrap

_LONGEST_LINE, _SHORTEST_LINE = 100, 20


def wrapped(text: str, width: int | None = None) -> str:
    """Break lines that are longer than the terminal between words; all others, such as a board's, stay as they are.

    Args:
        text: Any lines.
        width: The longest line; the terminal's, and no more than is read with ease, if None.
    """
    if width is None:
        width = min(_LONGEST_LINE, max(_SHORTEST_LINE, shutil.get_terminal_size().columns))
    return "\n".join(_wrap(line, width) for line in text.split("\n"))


def _wrap(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())][: width // 2]
    # What has no spaces to break at, such as a path or a number, stays whole and can be copied.
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
