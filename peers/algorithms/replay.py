r"""What `rollgym.trainer.algorithms` makes of the cases that other trainers' functions were recorded on.

    PYTHONPATH=. python peers/algorithms/replay.py CASES/*.jsonl \
        --out benchmarks/results/peer_algorithms.json

Values and gradients are equal where they are within 1e-6 of each other, in relation to numbers above 1 (1e-5 where the
peer computes in float32). A case that is not equal must be one of a choice that the docs name, or it is apart. Peers
that are not among the files given keep what the result has of them.
"""

import argparse
import importlib
import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.algorithms.cases import read
from peers.algorithms.ours import Case, Choice, Peer

TOLERANCE = {"float64": 1e-6, "float32": 1e-5}


@dataclass
class Tally:
    """What became of the cases of one function."""

    cases: int = 0
    equal: int = 0
    largest: float = 0.0
    tolerance: float = 1e-6
    gradients: bool = False
    named: dict[str, int] = field(default_factory=dict)
    apart: list[int] = field(default_factory=list)

    def written(self) -> dict[str, Any]:
        """Return it for the result: the largest difference is that of the cases that are equal."""
        return {
            "cases": self.cases,
            "equal": self.equal,
            "gradients": self.gradients,
            "largest_difference": self.largest,
            "tolerance": self.tolerance,
            "named_choices": self.named,
            "apart": self.apart,
        }


def main() -> None:
    """Replay files of cases, write the tallies and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--explain", action="store_true", help="Print each case that is not equal.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(given.out.read_text()) if given.out.exists() else {}
    for path in given.cases:
        name, version, tallies = replayed(path, explain=given.explain)
        result[name] = {
            "version": version,
            "functions": {function: tallies[function].written() for function in sorted(tallies)},
        }
    result = {name: result[name] for name in sorted(result)}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)


def replayed(path: Path, *, explain: bool = False) -> tuple[str, str, dict[str, Tally]]:
    """Return a file's peer, its version, and a tally for each of its functions."""
    peer, version = path.stem, ""
    ours: Peer = importlib.import_module(f"peers.algorithms.ours_{peer}").PEER
    tallies: dict[str, Tally] = {}
    for line in read(path):
        version = line["version"]
        tally = tallies.setdefault(line["function"], Tally(tolerance=TOLERANCE[line["dtype"]]))
        tally.cases += 1
        tally.gradients = tally.gradients or bool(line["gradients"])
        difference = furthest(line, ours)
        if difference <= tally.tolerance:
            tally.equal += 1
            tally.largest = max(tally.largest, difference)
            continue
        choice = choice_behind(line, ours, tally.tolerance)
        if choice is None:
            tally.apart.append(line["case"])
        else:
            tally.named[choice.reason] = tally.named.get(choice.reason, 0) + 1
        if explain:
            print(f"{line['function']} #{line['case']} off by {difference:.2e} {line['options']} {choice}")
    return peer, version, tallies


def choice_behind(line: Mapping[str, Any], ours: Peer, tolerance: float) -> Choice | None:
    """Return the choice that a case which is not equal is one of; what it is not about must be equal."""
    case = Case.of(line)
    for choice in ours.choices:
        if not choice.covers(case):
            continue
        if choice.rows is None or furthest(line, ours, among=~choice.rows(case)) <= tolerance:
            return choice
    return None


def furthest(line: Mapping[str, Any], ours: Peer, *, among: Tensor | None = None) -> float:
    """Return the largest difference of a case, infinite where we have no such function.

    Args:
        line: The case.
        ours: Our side of its peer.
        among: Rows of outputs that count, `[rows]`; all if None.
    """
    if line["function"] not in ours.adapters:
        return math.inf
    case = Case.of(line)
    leaves = {name: case.inputs[name].requires_grad_() for name in line["gradients"]}
    found = ours.adapters[line["function"]](case)
    largest = 0.0
    for name, theirs in line["outputs"].items():
        kept = None if name in line["everywhere"] else case.inputs.get("mask")
        if among is not None and kept is not None:
            kept = kept & among[:, None]
        largest = max(largest, distance(found[name], theirs, kept))
    if leaves:
        # Where nothing is left of a loss, nothing leads back to what it was made of.
        total = found[line["gradient_of"]].sum() + sum(leaf.sum() * 0 for leaf in leaves.values())
        made = torch.autograd.grad(total, list(leaves.values()))
        for name, gradient in zip(leaves, made, strict=True):
            largest = max(largest, distance(gradient, line["gradients"][name]))
    return largest


def distance(ours: Any, theirs: Any, kept: Tensor | None = None) -> float:
    """Return how far two numbers, or tensors of them, are apart in relation to those above 1."""
    first = torch.as_tensor(ours).detach().double()
    second = torch.as_tensor(theirs, dtype=torch.float64)
    if kept is not None and first.shape == kept.shape:
        first, second = first[kept], second[kept]
    if first.shape != second.shape:
        return math.inf
    if not first.numel():
        return 0.0
    apart = (first - second).abs() / second.abs().clamp(min=1.0)
    apart = torch.where((first == second) | (first.isnan() & second.isnan()), 0.0, apart)
    return float(apart.nan_to_num(nan=math.inf).max())


def print_table(result: Mapping[str, Any]) -> None:
    """Print a line for each function, and the choices that are behind what is not equal."""
    choices: list[str] = []
    print(f"{'peer':<9}{'function':<31}{'cases':>6}{'equal':>6}{'named':>6}{'apart':>6}{'largest':>9}")
    for name, peer in result.items():
        for function, tally in peer["functions"].items():
            marks = ",".join(str(place) for place in _places(tally["named_choices"], choices))
            line = f"{name[:8]:<9}{function[:30]:<31}{tally['cases']:>6}{tally['equal']:>6}"
            line += f"{sum(tally['named_choices'].values()):>6}{len(tally['apart']):>6}"
            print(f"{line}{tally['largest_difference']:>9.0e} {marks}".rstrip())
        every = list(peer["functions"].values())
        print(
            f"{name[:8]:<9}{'all of ' + peer['version']:<31}{_sum(every, 'cases'):>6}{_sum(every, 'equal'):>6}"
            f"{sum(sum(each['named_choices'].values()) for each in every):>6}"
            f"{sum(len(each['apart']) for each in every):>6}"
        )
    for place, reason in enumerate(choices, start=1):
        print(textwrap.fill(f"{place:>3} {reason}", width=80, subsequent_indent="    "))


def _places(named: Iterable[str], choices: list[str]) -> list[int]:
    for reason in named:
        if reason not in choices:
            choices.append(reason)
    return [choices.index(reason) + 1 for reason in named]


def _sum(tallies: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(tally[key] for tally in tallies)


if __name__ == "__main__":
    main()
