"""What memory a process and its children hold, as far as this system tells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clients.measuring.metrics import sum_of_metric

_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


def resident_of_tree(process_id: int) -> int | None:
    """Return the resident bytes of a process and all below it; None where /proc does not tell."""
    total = 0
    for home in _tree(process_id):
        try:
            found = _RESIDENT.search((home / "status").read_text())
        except OSError:
            continue  # it has ended meanwhile
        if found is not None:
            total += int(found.group(1)) * 1024
    return total or None


def _tree(process_id: int) -> Iterator[Path]:
    waiting = [process_id]
    while waiting:
        home = Path("/proc") / str(waiting.pop())
        try:
            for task in (home / "task").iterdir():
                waiting.extend(int(child) for child in (task / "children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile
        yield home


def resident_by_metrics(url: str, token: str | None) -> int | None:
    """Return the resident bytes of a server's I/O processes by its metrics; None where they do not tell."""
    found = sum_of_metric(url, token, "process_resident_memory_bytes")
    return None if found is None else int(found)
