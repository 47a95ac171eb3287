"""Numbers of a server's `/metrics`, how long threads have waited for a processor, and how slow a machine is."""

from __future__ import annotations

import http.client
import json
import math
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Cost:
    """How long something takes, as far as a busy machine lets that be known.

    Attributes:
        seconds: The least that was measured, without waiting for a processor.
        slowdown: How much slower the machine was meanwhile than at its best.
    """

    seconds: float
    slowdown: float = 1.0

    @property
    def undisturbed(self) -> float:
        """How long it would have taken at the machine's best."""
        return self.seconds / self.slowdown


def unmeasured(said: str, cost: Cost) -> str:
    """Say that a cost is not known, because the machine was too busy."""
    return (
        f"could not be measured: {said}, but the machine was {cost.slowdown:.1f} times slower than at its best; "
        "measure again on an idle one"
    )


class MachineSpeed:
    """Tells how much slower this machine computes than at its best.

    Who has a processor may still share its core, caches and memory with others, and then takes several times as long.
    """

    _WORK = "<a> \n" * 50_000

    def __init__(self) -> None:
        self._best = math.inf
        for _ in range(5):
            self.slowdown()

    def slowdown(self) -> float:
        """Return how much longer the same work takes now than it took when it took least."""
        begun = seconds_out_of_line()
        json.loads(json.dumps(self._WORK))
        taken = seconds_out_of_line() - begun
        self._best = min(self._best, taken)
        return taken / self._best


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
