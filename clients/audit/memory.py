"""How much memory a process and its children hold, as far as this system tells."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)
_METRIC = re.compile(r"^process_resident_memory_bytes(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_TIMEOUT_S = 10.0


def resident_of_tree(process_id: int) -> int | None:
    """Return the resident bytes of a process and all below it; None where /proc does not tell."""
    total, waiting = 0, [process_id]
    while waiting:
        home = Path("/proc") / str(waiting.pop())
        try:
            found = _RESIDENT.search((home / "status").read_text())
            for task in (home / "task").iterdir():
                waiting.extend(int(child) for child in (task / "children").read_text().split())
        except OSError:
            if int(home.name) == process_id:
                return None
            continue  # it has ended meanwhile
        if found is not None:
            total += int(found.group(1)) * 1024
    return total or None


def resident_by_metrics(url: str, token: str | None) -> int | None:
    """Return the resident bytes of a server's I/O processes by its metrics; None where they do not tell."""
    address = url.replace("ws://", "http://").replace("wss://", "https://").rstrip("/") + "/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return None
    values = [float(match) for match in _METRIC.findall(text)]
    return int(sum(values)) if values else None
