"""Every preset on two ranks with unequal numbers of micro-batches, beside one process.

    python benchmarks/training/presets_in_ranks.py [--backends fsdp2 zero3] [--presets ppo grpo] [--again] [--out FILE]

Episodes are of 4 to 60 tokens, in turns of 1 to 17; one has sampled nothing and one has no tokens at all. With the
batch `unequal` one rank has more micro-batches than the other, with `empty` one has no row. What is compared are
gradients (one step of SGD at a rate that makes weights of them) and the weights after two updates of two optimizer
steps each (one, where a preset has no ratio) by AdamW. Each case is written when it is done, and a script that was
stopped goes on behind the last.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset  # noqa: E402
from rollgym.trainer.backends.batching import (  # noqa: E402
    balanced,
    length_buckets,
    row_cost,
)
from rollgym.trainer.backends.ranked import Ranks  # noqa: E402
from rollgym.trainer.core.errors import TrainerError  # noqa: E402
from rollgym.trainer.learn.batches import episode_batch, row_builder  # noqa: E402
from rollgym.trainer.learn.learner import Learner  # noqa: E402
from rollgym.trainer.records.group import Group  # noqa: E402
from rollgym.trainer.records.trajectory import (  # noqa: E402
    Segment,
    Trajectory,
    TrajectoryOutcome,
    Turn,
)
from rollgym.trainer.tasks.task import Task  # noqa: E402
from tests.support import megatron_models, sharded_models  # noqa: E402
from tests.support.forked_ranks import ForkedRanks  # noqa: E402
from tests.support.played_groups import with_all_that_presets_read  # noqa: E402
from tests.support.sharded_models import GRADIENT_RATE, WIDTH, relative, settings_of, weights_of  # noqa: E402
from tests.support.tiny_models import reference_logprobs, sharp_model  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "presets_in_ranks.json"
BACKENDS = ("fsdp2", "zero1", "zero2", "zero3", "megatron")
BATCHES = ("unequal", "empty")
FORMS = ("gradient", "steps")
TOKENS = 40
"""Of a micro-batch."""
TOLERANCE = {"gradient": 1e-5, "steps": 1e-4}
TIMEOUT_S = 120.0
CASES_OF_RANKS = 60
"""After so many, the ranks are started anew."""


def episode(task, member, draws, turns, longest):
    """An episode of random tokens whose log-probabilities are near those of the policy."""
    trajectory, segment = Trajectory(task, member, outcome=TrajectoryOutcome.FAILED), Segment()
    for turn in range(turns):
        segment.append_context(draws.integers(2, 40, int(draws.integers(2, 5))).tolist())
        start = len(segment.ids)
        reply = draws.integers(2, 40, int(draws.integers(1, longest + 1))).tolist()
        segment.append_action(reply, [0.0] * len(reply), [0] * len(reply), turn)
        reward, anchor = float(draws.integers(2)), str(draws.integers(2))
        trajectory.turns.append(Turn(0, start, len(segment.ids), "", "", reward=reward, anchor=anchor))
    exact = [0.0, *reference_logprobs(sharp_model(), segment.ids)]
    noise = draws.normal(0.0, 0.1, len(exact))
    segment.behaviour_logprobs = [
        min(value + other, 0.0) if used else 0.0
        for value, other, used in zip(exact, noise.tolist(), segment.action_mask, strict=True)
    ]
    trajectory.segments.append(segment)
    return trajectory


def without_tokens(task, member, segments):
    """An episode in which the policy has sampled nothing."""
    turn = Turn(0, 0, 0, "", "", reward=0.0, anchor="0")
    return Trajectory(task, member, outcome=TrajectoryOutcome.FAILED, turns=[turn], segments=segments)


def played(batch):
    """Return the groups of a batch by its name."""
    draws = np.random.default_rng(0)
    if batch == "empty":
        task = Task(0, "Any-v0", seed=0)
        first = episode(task, 0, draws, 1, 17)
        first.turns[0].reward = 1.0
        return [Group(0, task, 0, [first, without_tokens(task, 1, [])])]
    groups = []
    for index in range(3):
        task = Task(index, "Any-v0", seed=index)
        members = [episode(task, member, draws, 1 + (index + member) % 3, 17) for member in range(4)]
        groups.append(Group(index, task, 0, members))
    silent = Segment()
    silent.append_context([3, 4, 5])
    groups[1].trajectories[3] = without_tokens(groups[1].task, 3, [silent])
    groups[2].trajectories[3] = without_tokens(groups[2].task, 3, [])
    return groups


def batch_of(name):
    return episode_batch(with_all_that_presets_read(played(name)), row_builder("step"))


def micro_batches(name):
    """Return how many micro-batches each rank has of a whole batch."""
    lengths = [len(row.ids) for row in batch_of(name).rows]
    parts = balanced([row_cost(length, WIDTH) for length in lengths], 2)
    return [len(length_buckets([lengths[index] for index in part], TOKENS)) for part in parts]


def made(ranks, backend, optimizer, rate):
    if backend == "megatron":
        return megatron_models.Made(ranks, megatron_models.DATA, optimizer, rate)
    return sharded_models.Made(ranks, backend, optimizer, rate)


async def learned(ranks, backend, preset, batch, form):
    """Return the weights that a preset comes to, and the metrics of its updates."""
    updates = 1 if form == "gradient" else 2
    has_ratio = PRESETS[preset].surrogate.kind != "reinforce"
    settings = resolve_preset(preset, {"minibatches": updates if has_ratio else 1, "epochs": 1})
    rate = GRADIENT_RATE if form == "gradient" else 1e-3
    kind = {"kind": "sgd"} if form == "gradient" else {"epsilon": 1e-5}
    optimizer = settings_of(tokens_per_micro_batch=TOKENS, shared_prefixes="off", **kind)
    models = made(ranks, backend, optimizer, rate).models(settings)
    learner = Learner(settings, models, seed=1)
    metrics = [await learner.update(batch_of(batch), step) for step in range(updates)]
    return weights_of(models), metrics


def worst_metric(found, expected):
    """Return the metric that differs most, and by how much of its size (or of 1, if it is smaller)."""
    differences = {"": 0.0}
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        for name, value in other.items():
            same = one[name] == value or (math.isnan(value) and math.isnan(one[name]))
            apart = 0.0 if same else abs(one[name] - value) / max(abs(value), 1.0)
            differences[name] = max(differences.get(name, 0.0), apart)
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]


class Comparison:
    """Compares cases, each with what one process comes to, which is computed once."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._ranks, self._backend, self._cases = None, None, 0
        self._alone = {}

    async def case(self, backend, preset, batch, form):
        key = (preset, batch, form)
        if key not in self._alone:
            self._alone[key] = await learned(None, backend, preset, batch, form)
        expected, metrics = self._alone[key]
        try:
            found, its = await learned(self._started(backend), backend, preset, batch, form)
        except TrainerError as error:
            return {"equal": False, "failed": str(error)}
        apart = relative(found, expected)
        metric, by = worst_metric(its, metrics)
        return {
            "equal": apart < TOLERANCE[form] and by < 1e-3,
            "weights": apart,
            "metrics": by,
            "worst_metric": metric,
            "steps": sum(each.get("policy/optimizer_steps", 0.0) for each in metrics),
        }

    def _started(self, backend):
        old = self._ranks
        if old is None or old.failed or backend != self._backend or self._cases >= CASES_OF_RANKS:
            self.close()
            logs = self._folder / f"{backend}_{time.monotonic_ns()}"
            logs.mkdir(parents=True)
            self._ranks = Ranks(ForkedRanks(logs), sharded_models.MESHES["data"], "cpu", TIMEOUT_S)
            self._ranks.start()
            self._backend, self._cases = backend, 0
        self._cases += 1
        return self._ranks

    def close(self):
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def written(out):
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return {(row["backend"], row["preset"], row["batch"], row["form"]): row for row in rows}


def write(rows, counts, out):
    content = {
        "command": "python benchmarks/training/presets_in_ranks.py",
        "ranks": 2,
        "micro_batches_of_the_ranks": counts,
        "tolerance_of_weights": TOLERANCE,
        "cases": len(rows),
        "equal": sum(row["equal"] for row in rows.values()),
        "rows": list(rows.values()),
    }
    beside = out.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(out)


async def compare(options):
    counts = {name: micro_batches(name) for name in BATCHES}
    assert counts["unequal"][0] != counts["unequal"][1], counts
    assert 0 in counts["empty"], counts
    rows = {} if options.again else written(options.out)
    commit = revision(ROOT)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Comparison(folder)) as comparison:
        for form, batch, backend, preset in itertools.product(
            FORMS, BATCHES, options.backends, options.presets
        ):
            key = (backend, preset, batch, form)
            if key in rows:
                continue
            names = dict(zip(("backend", "preset", "batch", "form"), key, strict=True))
            rows[key] = names | await comparison.case(*key) | {"commit": commit}
            print(json.dumps(rows[key]), flush=True)
            write(rows, counts, options.out)
    different = [key for key, row in rows.items() if not row["equal"]]
    print(f"{len(rows)} cases, {len(rows) - len(different)} equal", *map(str, different), sep="\n")
    return 1 if different else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--again", action="store_true", help="begin anew")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
