"""The result as Markdown tables."""

from collections.abc import Sequence
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a run."""
    parts = [_about(result)]
    if result["steps"]:
        parts.append(_steps(result["steps"]))
    if result["idle"]:
        rows = [
            (each["who"], each["sessions"], f"{each['kib_per_session']:.1f}", f"{each['server_mib']:.0f}")
            for each in result["idle"]
        ]
        parts.append(_table(("server", "idle sessions", "KiB a session", "server before, MiB"), rows))
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
        parts.append(_table(("client", "sessions", "client CPU µs a step", "steps/s"), rows))
    return "\n\n".join(parts)


def _about(result: dict[str, Any]) -> str:
    loads = [each["load_average"] for each in result["steps"]] or [result["load_average_at_start"]]
    return (
        f"{result['cpu']}, {result['cpus']} cores; commit {result['commit'][:12]}; medians of {result['rounds']} "
        f"rounds of {result['seconds']:g} s; load average {result['load_average_at_start']} before, "
        f"{min(loads):.2f} to {max(loads):.2f} during (this benchmark's own processes included)."
    )


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
    return _table(("server", "sessions", "server CPU µs a step", "steps/s", "p50 ms", "p99 ms"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
