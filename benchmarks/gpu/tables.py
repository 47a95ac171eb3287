"""Write the table of docs/gpus_measure.md from what was measured on a GPU.

python benchmarks/gpu/tables.py gpu-results/gpu.json   # what benchmarks/gpu/run.py has written
python benchmarks/gpu/tables.py                        # the record that is kept in benchmarks/results
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpus_measure.md"
RECORD = ROOT / "benchmarks" / "results" / "gpu.json"
_BLOCK = re.compile(r"(<!-- from gpu\.json -->\n).*?(<!-- end of gpu\.json -->)", re.DOTALL)


def page_of(text: str, record: Mapping[str, Any] | None) -> str:
    """Return the page with the table of a record; without one, the page as it is."""
    if record is None:
        return text
    return _BLOCK.sub(lambda found: found[1] + table(record) + found[2], text)


def table(record: Mapping[str, Any]) -> str:
    """Return what a record says as Markdown: which machine it was, and a row for each figure."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = ["| part | case | result |", "| --- | --- | --- |"]
    for name, found in record["parts"].items():
        rows = list(_rows(name, found))
        lines += [
            f"| {name if not number else ''} | {case} | {said} |" for number, (case, said) in enumerate(rows)
        ]
    about = f"{record['device']}, Python {record['python']}, {versions}; commit {record['commit'][:8]}."
    return f"{about}\n\n`{record['command']}`\n\n" + "\n".join([*lines, *_curves(record["parts"])]) + "\n"


def _curves(parts: Mapping[str, Any]) -> list[str]:
    """Return a table of how success rose in the runs: of the episodes that were trained on, at some of the steps."""
    lines = []
    for name, found in parts.items():
        if _ROWS.get(name) is not _learning:
            continue
        for run, each in found.get("figures", {}).items():
            points = [(line["step"], line["rollout/success"]) for line in each["curve"]]
            chosen = points[:: max(1, -(-len(points) // _POINTS))]
            told = ", ".join(f"{step}: {success:.2f}" for step, success in chosen)
            lines.append(f"| {name} | {run} | {told or 'no step'} |")
    head = [
        "",
        "Success of the episodes of a step, by step:",
        "",
        "| part | run | curve |",
        "| --- | --- | --- |",
    ]
    return [*head, *lines] if lines else []


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "not_run" in found:
        yield "", f"not run: {found['not_run']}"
        return
    if "stopped" in found or found["exit_code"]:
        words = " ".join(found.get("last_words", []))[:120].replace("|", "/")
        yield "", f"{found.get('stopped', 'exit code ' + str(found['exit_code']))}: {words}"
    figures = found.get("figures", {})
    rows = _ROWS.get(name, _plain)(figures)
    yield from (
        rows if figures else [("", f"ended well in {found['seconds']:.0f} s")] * (not found["exit_code"])
    )


def _training(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for case, each in figures["results"].items():
        if "not_run" in each:
            yield case, f"not run: {each['not_run'][:120]}"
        else:
            mfu = "" if each["mfu"] is None else f", MFU {100 * each['mfu']:.1f} %"
            memory = "" if each["peak_gib"] is None else f", {each['peak_gib']:g} GiB"
            yield case, f"{each['tokens_per_s']:,.0f} tokens a second{mfu}{memory}"


def _sampling(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for rows, found in figures["results"].items():
        if "not_run" in found:
            yield rows, f"not run: {found['not_run'][:120]}"
            continue
        for who, each in found.items():
            if "not_run" in each:
                yield f"{rows}, {who}", f"not run: {each['not_run'][:120]}"
                continue
            step = f", {each['ms_per_decoding_step']:.1f} ms a step" if "ms_per_decoding_step" in each else ""
            yield f"{rows}, {who}", f"{each['tokens_per_s']:,.0f} tokens a second{step}"


def _beside_trl(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for case, each in figures["results"].items():
        shared = each["speed_up_with_shared_prefixes"]
        yield case, f"{each['speed_up']:.2f}x TRL's samples a second, {shared:.2f}x with shared prefixes"


def _learning(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, each in figures.items():
        measured = [
            (line["step"], key, value)
            for line in each["evaluated"]
            for key, value in line.items()
            if key.endswith("sampled/success")
        ]
        sets = {key for _, key, _ in measured}
        told = [
            (f"{key.split('/')[1]} " if len(sets) > 1 else "", step, value) for step, key, value in measured
        ]
        said = ", ".join(f"{of}step {step}: {value:.3f}" for of, step, value in told)
        goal = f" (goal {_GOALS[name]})" if name in _GOALS and each.get("rate", 1.0) == 1.0 else ""
        health = "".join(f"; {line.replace('|', '/')}" for line in each.get("health", [])[:1])
        yield name, f"{each['steps']} steps; success {said or 'not measured'}{goal}{health}"


def _preset(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    later = figures["later"]
    yield (
        f"sampled by {figures['sampled_by']}",
        f"{figures['steps']} steps, the first in {figures['first_step_s']} s",
    )
    if later:
        yield (
            "a later step",
            ", ".join(f"{name.partition('/')[2]} {value:.4g}" for name, value in later.items()),
        )
    if figures["device"]:
        yield "what the device decided", json.dumps(figures["device"])[:160].replace("|", "/")


def _backends(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, each in figures.items():
        seconds = f"{each['step_s'][-1]:.2f} s a step" if each["step_s"] else each.get("last_words", "")
        yield name, f"{each['steps']} of 3 steps; {seconds}"


def _plain(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, each in figures.items():
        yield name, json.dumps(each)[:160].replace("|", "/")


_GOALS = {
    "FrozenLake": "0.60",
    "Sokoban": "above 0.352 on `simple`",
    "sums": "0.80",
    "WebShop": "above the start",
}
"""Success on the held-out tasks that a run is to reach."""
_POINTS = 10
"""Steps of a curve that are shown."""
_ROWS = {
    "training": _training,
    "sampling": _sampling,
    "beside_trl_equal": _beside_trl,
    "beside_trl_padded": _beside_trl,
    "learning": _learning,
    "learning_1": _learning,
    "learning_2": _learning,
    "learning_rate": _learning,
    "preset": _preset,
    "backends": _backends,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "record", type=Path, nargs="?", help="gpu.json of a run; default: the one that is kept"
    )
    options = parser.parse_args()
    if options.record is not None:
        RECORD.write_bytes(options.record.read_bytes())
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else None
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
