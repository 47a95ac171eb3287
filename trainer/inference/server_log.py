"""The log of a server that the run started, and the reason of its end according to the log."""

import os
import re
from pathlib import Path
from typing import BinaryIO

_LAST_LINES = 20
_LINE_WIDTH = 300
_READ_AT_END = 2**16
"""Bytes of what a server said that are looked through: vLLM says why its engine ended far above its last lines."""
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): \S")
_UNKNOWN_SWITCH = re.compile(r"unrecognized arguments|no such option", re.I)
_SHORT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|memory utilization|KV cache memory|mem-fraction-static", re.I
)
"""What vLLM, SGLang and torch say where a device's memory does not suffice."""


class ServerLog:
    """What one server says, appended to a file over all its starts.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = 0

    def opened(self) -> BinaryIO:
        """Open the file for a server that is about to start; what others have said before is read no more."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        output = self._path.open("ab")
        self._begin = output.tell()
        return output

    def lines(self) -> list[str]:
        """What it said last since it was started, by lines; none if it can no longer be read."""
        try:
            with self._path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._begin, size - _READ_AT_END))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line[:_LINE_WIDTH] for line in text.splitlines() if line.strip()]

    def last_words(self) -> str:
        """The last lines as the rest of a sentence, with what can be done about them; empty without any lines."""
        told = self.lines()
        before, lines = told[:-_LAST_LINES], told[-_LAST_LINES:]
        if not lines:
            return ""
        said = "; the last lines of " + "\n  ".join([f"{self._path}:", *lines])
        # An engine is a process of its own, whose end the last lines only tell of.
        causes = [line for line in before if _EXCEPTION.search(line)][-1:]
        if causes:
            said += f"\nSaid before: {causes[0]}"
        if any(map(_UNKNOWN_SWITCH.search, lines)):
            said += (
                "\nIt is of a release that does not know a switch: runs start vLLM 0.31 and SGLang 0.5.20 or newer; "
                "start an older one yourself and give its address by inference.urls"
            )
        if any(map(_SHORT_OF_MEMORY.search, [*lines, *causes])):
            said += (
                "\nMemory does not suffice: look for what else is on the device, set inference.launch.memory_fraction "
                "or tensor_parallel, or lower model.max_length"
            )
        return said
