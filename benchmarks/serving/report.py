"""The result as Markdown tables."""

from collections.abc import Sequence
from typing import Any

from rounds import about, table


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a run."""
    parts = [about(result, result["steps"])]
    if result["steps"]:
        parts.append(_steps(result["steps"]))
    if result["idle"]:
        rows = [
            (each["who"], each["sessions"], f"{each['kib_per_session']:.1f}", f"{each['server_mib']:.0f}")
            for each in result["idle"]
        ]
        parts.append(table(("server", "idle sessions", "KiB a session", "server before, MiB"), rows))
    if result["clients"]:
        rows = [
            (
                each["who"],
                each["sessions"],
                f"{each['client_cpu_us_per_step']:.1f}",
                f"{each['steps_per_s']:,.0f}",
            )
            for each in result["clients"]
        ]
        parts.append(table(("client", "sessions", "client CPU µs a step", "steps/s"), rows))
    return "\n\n".join(parts)


def _steps(found: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            each["who"],
            each["sessions"],
            f"{each['server_cpu_us_per_step']:,.1f}",
            f"{each['steps_per_s']:,.0f}",
            f"{each['p50_ms']:,.2f}",
            f"{each['p99_ms']:,.2f}",
        )
        for each in sorted(found, key=lambda each: each["sessions"])
    ]
    return table(("server", "sessions", "server CPU µs a step", "steps/s", "p50 ms", "p99 ms"), rows)
