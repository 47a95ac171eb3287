"""Numbers of a server's `/metrics`, and how long threads have waited for a processor."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the token is for the server that the user has named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def sum_of_metric(url: str, token: str | None, name: str) -> float | None:
    """Return the sum of a metric over its labels; None if the server's metrics lack it.

    Args:
        url: The server's address.
        token: Bearer token.
        name: The name of the metric.
    """
    return sums_of_metrics(url, token, name)[0]


def sums_of_metrics(url: str, token: str | None, *names: str) -> list[float | None]:
    """Return the sums of some metrics over their labels, as of one moment; None for each that is missing."""
    address = url.replace("ws://", "http://").replace("wss://", "https://").rstrip("/") + "/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return [None for _ in names]
    return [_sum(text, name) for name in names]


def _sum(text: str, name: str) -> float | None:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    try:
        found = sum(map(float, values))
    except ValueError:
        return None
    return found if values and math.isfinite(found) else None


def queued_seconds(process_id: int | None = None) -> float | None:
    """Return how long the main thread of a process has waited for a processor since it began.

    Args:
        process_id: The process; None for the calling thread.

    Returns:
        Seconds; None if the system does not report it (Linux does), or if the process has ended.
    """
    place = "thread-self" if process_id is None else f"{process_id}/task/{process_id}"
    try:
        return int((Path("/proc") / place / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def seconds_out_of_line() -> float:
    """Return a clock's time that stands still while the calling thread stands in line for a processor."""
    queued = queued_seconds() or 0.0
    while True:
        now, before = time.perf_counter(), queued
        queued = queued_seconds() or 0.0
        # Who stood in line between the two readings would have it counted to one end, and not to the other.
        if queued == before:
            return now - queued


def queued_by_metrics(url: str, token: str | None) -> float | None:
    """Return how long a server's loop has waited for a processor; None without that metric, or with several loops."""
    processes, seconds = sums_of_metrics(
        url, token, "rollgym_processes", "rollgym_event_loop_queued_seconds_total"
    )
    return seconds if processes == 1 else None


_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


def resident_of_tree(process_id: int) -> int | None:
    """Return the resident bytes of a process and all below it; None if /proc does not report them."""
    total = 0
    for home in _tree(process_id):
        try:
            found = _RESIDENT.search((home / "status").read_text())
        except OSError:
            continue  # it has ended in the meantime
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
            continue  # it has ended in the meantime
        yield home


def resident_by_metrics(url: str, token: str | None) -> int | None:
    """Return the resident bytes of a server's I/O processes by its metrics; None if they do not report it."""
    found = sum_of_metric(url, token, "process_resident_memory_bytes")
    return None if found is None else int(found)
