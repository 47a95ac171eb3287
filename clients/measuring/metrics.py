"""Numbers of a server's `/metrics`."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

_TIMEOUT_S = 10.0


def sum_of_metric(url: str, token: str | None, name: str) -> float | None:
    """Return the sum of a metric over its labels; None where the server's metrics do not tell.

    Args:
        url: The server's address.
        token: Bearer token.
        name: Of the metric.
    """
    return sums_of_metrics(url, token, name)[0]


def sums_of_metrics(url: str, token: str | None, *names: str) -> list[float | None]:
    """Return the sums of some metrics over their labels, as of one moment; None for each that is not told."""
    address = url.replace("ws://", "http://").replace("wss://", "https://").rstrip("/") + "/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return [None for _ in names]
    return [_sum(text, name) for name in names]


def _sum(text: str, name: str) -> float | None:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None
