"""Rounds of a benchmark: cases take turns, medians are kept, and what the machine did meanwhile is written down."""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import processes

Rows = dict[tuple[str, int], list[dict[str, float]]]
"""What each case gave, by its name and its number of sessions: one entry a round."""


def medians(rows: Rows) -> list[dict[str, Any]]:
    """One row for each case."""
    return list(_medians(rows))


def _medians(rows: Rows) -> Iterator[dict[str, Any]]:
    for (label, sessions), found in rows.items():
        values = {name: statistics.median(each[name] for each in found) for name in found[0]}
        spread = {
            name: [min(each[name] for each in found), max(each[name] for each in found)] for name in found[0]
        }
        yield {"who": label, "sessions": sessions, **values, "spread": spread}


def median(values: Iterable[float]) -> float:
    """The median as tables show it."""
    return round(statistics.median(values), 2)


def ratio(rows: Rows, name: str, ours: tuple[str, int], reference: tuple[str, int]) -> float | None:
    """The median over the rounds of how one case stands to another; None where either was not measured."""
    if ours not in rows or reference not in rows:
        return None
    pairs = zip(rows[ours], rows[reference], strict=True)
    return median(one[name] / other[name] for one, other in pairs)


def bar(
    what: str, found: float | None, *, least: float | None = None, most: float | None = None
) -> dict[str, Any]:
    """A figure and what it should be; the case that it needs may not have been measured."""
    wanted = f"at least {least:g}" if least is not None else f"at most {most:g}"
    met = None
    if found is not None:
        met = found >= least if least is not None else most is not None and found <= most
    return {"what": what, "found": found, "wanted": wanted, "met": met}


def bars_table(bars: Sequence[Mapping[str, Any]]) -> str:
    """The bars as Markdown."""
    says = {True: "yes", False: "**no**", None: "not measured"}
    return table(
        ("bar", "wanted", "found", "met"),
        [(each["what"], each["wanted"], shown(each["found"]), says[each["met"]]) for each in bars],
    )


def shown(value: float | None) -> str:
    """A number for a table."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose first column is text."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def about(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """One line that says on what, of what and beside what a run was made."""
    loads = [each["load_average"] for each in rows] or [result["load_average_at_start"]]
    return (
        f"{result['cpu']}, {result['cpus']} cores; commit {result['commit'][:12]}; medians of {result['rounds']} "
        f"rounds of {result['seconds']:g} s; load average {result['load_average_at_start']} before, "
        f"{min(loads):.2f} to {max(loads):.2f} during (this benchmark's own processes included)."
    )


def parser(description: str | None, *, rounds: int, seconds: float) -> argparse.ArgumentParser:
    """The arguments that every one of these benchmarks has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="regular expression of the names to measure")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    made.add_argument("--out", type=Path, help="JSON file for the result")
    return made


def record(
    script: str, options: argparse.Namespace, pythons: Mapping[str, str], paths: Mapping[str, str]
) -> dict[str, Any]:
    """What is known before the first round.

    Args:
        script: The benchmark's path in the repository.
        options: Its arguments.
        pythons: Interpreters of peers.
        paths: What stands in the command in place of this machine's paths.
    """
    arguments = [paths.get(argument, argument) for argument in sys.argv[1:]]
    return {
        "command": shlex.join(["python", script, *arguments]),
        **processes.machine(),
        "versions": processes.versions(pythons),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_average_at_start": processes.load_average(),
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    """Complete a result and keep it."""
    result["load_average_at_end"] = processes.load_average()
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
