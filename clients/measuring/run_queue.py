"""How long a thread was ready to run and had no processor: what a busy machine adds to everything that is timed."""

from __future__ import annotations

from pathlib import Path

from clients.measuring.metrics import sums_of_metrics


def queued_seconds(process_id: int | None = None) -> float | None:
    """Return how long the main thread of a process has stood in line for a processor since it began.

    Args:
        process_id: Which process; the calling thread where it is None.

    Returns:
        Seconds; None where the system does not tell (it is Linux that does), or the process has ended.
    """
    place = "thread-self" if process_id is None else f"{process_id}/task/{process_id}"
    try:
        return int((Path("/proc") / place / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def queued_by_metrics(url: str, token: str | None) -> float | None:
    """Return how long the loop of a server has stood in line; None where its metrics do not tell, or it has several."""
    processes, seconds = sums_of_metrics(
        url, token, "rollgym_processes", "rollgym_event_loop_queued_seconds_total"
    )
    return seconds if processes == 1 else None
