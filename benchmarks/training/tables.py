"""Writes the tables of docs/results_speed.md anew from what was measured: `python benchmarks/training/tables.py`.

A table stands between two comments that name its record in benchmarks/results; all else of the page stays.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results_speed.md"
_BLOCK = r"(<!-- from {0}\.json -->\n).*?(<!-- end of {0}\.json -->)"


def beside_trl(record: dict[str, Any]) -> str:
    """One row for each case."""
    rows = [
        [
            case,
            f"{100 * found['padding_share_of_trl']:.0f} %",
            f"{found['gradients_relative_l2']:.0e}",
            f"{found['cpu_s_a_step_trl']:.2f}",
            f"{found['cpu_s_a_step_ours']:.2f}",
            f"{found['speed_up']:.2f}x",
            f"{found['speed_up_in_cpu_time']:.2f}x",
            f"{found['speed_up_with_shared_prefixes']:.2f}x",
            f"{found['speed_up_in_cpu_time_with_shared_prefixes']:.2f}x",
        ]
        for case, found in record["results"].items()
    ]
    table = _table(
        [
            "lengths",
            "padding in TRL's batch",
            "gradients apart (relative L2)",
            "TRL, CPU s a step",
            "ours",
            "samples a second",
            "processor time",
            "samples a second with shared prefixes",
            "processor time with shared prefixes",
        ],
        rows,
    )
    return f"{table}\nLoad of the machine, the benchmark's own with it: {record['load'][0]:.1f}.\n"


def shared_prefixes(record: dict[str, Any]) -> str:
    """One row for each model and batch, and the worst gradient of each model's presets."""
    rows, errors = [], []
    for model, cases in record["results"].items():
        for case, found in cases.items():
            if case == "gradient_error_by_preset":
                worst = max(found, key=found.get)
                errors.append([model, str(len(found)), f"{found[worst]:.1e}", worst])
                continue
            rows.append(
                [
                    model,
                    case,
                    f"{found['tokens']:,}",
                    f"{found['computed']:,}",
                    f"{found['speedup']:.2f}",
                    f"{found['held_mib']['off']:.0f}, now {found['held_mib']['auto']:.0f}",
                    f"{found['gradient_error']:.1e}",
                ]
            )
    heads = [
        "model",
        "batch",
        "tokens of rows",
        "computed",
        "speed of a step",
        "held, MiB",
        "gradient's error",
    ]
    table = _table(heads, rows)
    if errors:
        table += "\n" + _table(["model", "presets and layouts", "largest error", "of"], errors)
    begun, ended = (record["load_average"][when] for when in ("begun", "ended"))
    rounds = f"Medians of {record['rounds']} rounds, three times as many where nothing is shared"
    return (
        f"{table}\n{rounds}. Load of the machine, the benchmark's own with it: {begun:.1f} to {ended:.1f}.\n"
    )


def one_gpu(record: dict[str, Any]) -> str:
    """One row for each case."""
    rows = []
    for case, found in record["results"].items():
        if case == "beside TRL":
            continue
        if "not_run" in found:
            rows.append([case, f"not run: {found['not_run']}", "", "", "", ""])
            continue
        speed = found.get("tokens_per_s")
        rows.append(
            [
                case,
                "" if speed is None else f"{speed:,.0f}",
                f"{found['generated_tokens_per_s']:,.0f}" if speed is None else "",
                "" if found["peak_gib"] is None else f"{found['peak_gib']:g}",
                f"{found['model_tflops_per_s']:g}" if speed is not None else "",
                f"{100 * found['mfu']:.1f} %" if found.get("mfu") is not None else "",
            ]
        )
    heads = ["case", "tokens trained a second", "generated", "peak GiB", "model TFLOP/s", "MFU"]
    return _table(heads, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "beside_trl": beside_trl,
    "shared_prefixes": shared_prefixes,
    "one_gpu": one_gpu,
}


def page_of(text: str, folder: Path) -> str:
    """Return the page with the tables of those records that are in a folder."""
    for name, table in TABLES.items():
        file = folder / f"{name}.json"
        if file.exists():
            made = table(json.loads(file.read_text(encoding="utf-8")))
            text = re.sub(
                _BLOCK.format(name),
                lambda found, made=made: found.group(1) + made + found.group(2),
                text,
                flags=re.DOTALL,
            )
    return text


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    results = ROOT / "benchmarks" / "results"
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
