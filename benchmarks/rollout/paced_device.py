"""How busy a run keeps a device whose pace is known, and where the rest of the time goes.

The command is the real one, and so are its loop, scheduler, records and batches, the embedded engine with its queue and
its second model, and the environment server (`roll-serve` on loopback). Only what a device computes is left out: a
decoding step, the reading of prompts, a pass over rows and an optimizer step take a fixed time of one device, which
serves what it is asked for in the order of arrival, as a stream of kernels does. A step of training is asked for in
slices, one ahead, so that decoding steps come between them. Launching costs nothing here; on a real device it takes the
processor.

Replies are one of four moves, drawn at random, of four tokens with their ends; so FrozenLake's episodes last as long as
those of a policy that has not learnt yet. 16 groups of 8 are trained in each step, as in examples/pretrained.

    python benchmarks/rollout/paced_device.py --output benchmarks/results/paced_device.json
    python benchmarks/rollout/paced_device.py --decode-ms 10 --train-s 1.2 --steps 12
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer import cli  # noqa: E402
from rollgym.trainer.backends.base import EntropyMode, LossFunction, StepReport, TrainRow  # noqa: E402
from rollgym.trainer.backends.torch_backend import TorchBackend  # noqa: E402
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult  # noqa: E402
from rollgym.trainer.inference.engine import torch_engine  # noqa: E402
from rollgym.trainer.inference.engine.decoding import Drawn, ReplyRow  # noqa: E402
from rollgym.trainer.learn.pipelines import rl  # noqa: E402
from rollgym.trainer.learn.step_metrics import StepTimes  # noqa: E402
from rollgym.trainer.models.tiny import END, build_tiny_tokenizer  # noqa: E402
from rollgym.trainer.run import backends, inference  # noqa: E402

CONFIG = ROOT / "examples/pretrained/frozen_lake.yaml"
MOVES = ("Left", "Down", "Right", "Up")
TOKENS = 4
"""Of a reply, its end included."""
WARM_UP = 2
"""Steps that are not counted: the pipeline is empty when a run begins."""
PARTS = ("rollout", "training", "weights", "records", "between steps")


class Device:
    """Does one thing at a time, in the order of arrival."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []
        self._free_at = 0.0
        self._asking = threading.Lock()

    def ask(self, seconds: float) -> float:
        """Have the device compute, once it has been through all that it was asked before; return when that ends."""
        with self._asking:
            begins = max(time.monotonic(), self._free_at)
            self._free_at = begins + seconds
            self.busy.append((begins, self._free_at))
            return self._free_at

    def take(self, seconds: float) -> None:
        """Have the device compute, and wait for the result."""
        wait_until(self.ask(seconds))

    def busy_between(self, since: float, until: float) -> float:
        """Return the seconds of that time in which it computed."""
        return sum(max(min(end, until) - max(begin, since), 0.0) for begin, end in self.busy)


def wait_until(moment: float) -> None:
    """Sleep until a moment of the clock."""
    time.sleep(max(moment - time.monotonic(), 0.0))


@dataclass(frozen=True)
class Pace:
    """What takes how long.

    Attributes:
        decode_s: A decoding step, however many rows there are.
        prompts_s: Reading the prompts of rows that join.
        train_s: All optimizer steps of an update.
        slice_s: The longest that training has the device before a decoding step may come between. One slice is asked
            for while the device computes the one before: kernels are launched ahead, and their results not waited for.
    """

    decode_s: float
    prompts_s: float
    train_s: float
    slice_s: float = 0.01


DEVICE = Device()
STEPS: list[StepTimes] = []
PROCESSOR_S: list[float] = []


class PacedRows:
    """Stands in for the engine's batch: its rows draw moves, and every step takes its time of the device."""

    pace: Pace

    def __init__(self, *_: object, **__: object) -> None:
        tokenizer = build_tiny_tokenizer()
        end = tokenizer.convert_tokens_to_ids(END)
        blank = tokenizer.encode(" ", add_special_tokens=False)
        replies = [tokenizer.encode(move, add_special_tokens=False) for move in MOVES]
        self._replies = [[*ids, *blank * (TOKENS - 1 - len(ids)), end] for ids in replies]
        self._rows: list[ReplyRow] = []
        self.drawn: list[int] = []
        self.is_released = False

    def advance(self, admitted: Sequence[GenerationRequest], version: int) -> list[tuple[int, Drawn]]:
        """Draw a token of every row."""
        decodes = bool(self._rows)
        self._rows += [ReplyRow.begun(request, None) for request in admitted]
        DEVICE.take(decodes * self.pace.decode_s + bool(admitted) * self.pace.prompts_s)
        finished = []
        self.drawn = []
        for index, row in enumerate(self._rows):
            reply = self._replies[row.request.seed % len(self._replies)]
            token = reply[len(row.ids)]
            self.drawn.append(token)
            result = row.take(token, 0.0 if row.ids else -math.log(len(MOVES)), version)
            if result is not None:
                finished.append((index, result))
        self.remove([index for index, _ in finished])
        return finished

    def remove(self, indices: Sequence[int]) -> None:
        """Let rows go."""
        gone = set(indices)
        self._rows = [row for index, row in enumerate(self._rows) if index not in gone]

    def take(self, indices: Sequence[int]) -> list[GenerationResult]:
        """Let rows leave with what they have."""
        rows = [self._rows[index] for index in indices]
        self.remove(indices)
        return [GenerationResult(row.ids, row.logprobs, row.versions, "abort") for row in rows]

    def recompute(self) -> None:
        """Read all rows anew, with new weights."""
        if self._rows:
            DEVICE.take(self.pace.prompts_s)

    def release(self) -> None:
        """Give back nothing: there are no keys and values."""


class PacedBackend(TorchBackend):
    """A backend whose passes and steps take their time of the device, and change nothing."""

    pace: Pace
    minibatches: int

    def forward(self, rows: Sequence[TrainRow]) -> list[torch.Tensor]:
        """Take the time of a pass without gradient: a third of the optimizer steps'."""
        self._compute(self.pace.train_s / 3)
        return [row.fields.get("behaviour_logprobs", torch.zeros(len(row.ids))) for row in rows]

    def step(
        self,
        rows: Sequence[TrainRow],
        loss: LossFunction,
        *,
        entropy: EntropyMode = "none",
        keep_outputs: bool = False,
    ) -> StepReport:
        """Take the time of an optimizer step."""
        self._compute(self.pace.train_s / self.minibatches)
        outputs = [torch.zeros(len(row.ids)) for row in rows] if keep_outputs else None
        return StepReport({}, 1.0, applied=True, outputs=outputs)

    def _compute(self, seconds: float) -> None:
        slices = max(1, round(seconds / self.pace.slice_s))
        before = ends = 0.0
        for _ in range(slices):
            wait_until(before)
            before, ends = ends, DEVICE.ask(seconds / slices)
        wait_until(ends)


def run_here(pace: Pace, words: Sequence[str]) -> int:
    """Run `roll-train` in this process, on the paced device."""
    PacedRows.pace = PacedBackend.pace = pace
    PacedBackend.minibatches = 2  # as the example has it
    told: Callable[..., dict[str, float]] = rl.step_times

    def step_times(times: StepTimes, *rest: Any) -> dict[str, float]:
        STEPS.append(times)
        PROCESSOR_S.append(time.process_time())
        return told(times, *rest)

    async def agreed(*_: object) -> None:
        """The engine and the backend draw nothing from the model here."""

    rl.step_times = step_times  # type: ignore[assignment]
    torch_engine.SlotBatch = PacedRows  # type: ignore[assignment, misc]
    backends.TorchBackend = PacedBackend  # type: ignore[misc]
    inference.probe_log_probabilities = agreed  # type: ignore[assignment]
    return cli.main([*words])


def idle_parts(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return the seconds of a step in which the device waited, by what the loop did meanwhile."""
    idle: dict[str, float] = defaultdict(float)
    for part, since, until in _parts(steps):
        idle[part] += until - since - DEVICE.busy_between(since, until)
    return {part: idle[part] / len(steps) for part in PARTS}


def _parts(steps: Sequence[StepTimes]) -> Iterator[tuple[str, float, float]]:
    for times in steps:
        moments = (times.waiting, times.training, times.syncing, times.recording, times.ended)
        yield from zip(PARTS, moments, moments[1:], strict=False)
        if times.last_ended is not None:
            yield "between steps", times.last_ended, times.waiting


def figures(folder: Path, episodes: int) -> dict[str, Any]:
    """Return what a run came to, without its first steps."""
    counted = STEPS[WARM_UP:]
    since, until = STEPS[WARM_UP - 1].ended, counted[-1].ended
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if "time/step_s" in line][WARM_UP:]
    names = sorted(
        {name for line in own for name in line if name.startswith("time/") and name.endswith("_s")}
    )
    busy = DEVICE.busy_between(since, until)
    steps = len(counted)
    return {
        "busy": busy / (until - since),
        "episodes_per_s": episodes * steps / (until - since),
        "step_s": (until - since) / steps,
        "busy_s": busy / steps,
        "processor_s": (PROCESSOR_S[-1] - PROCESSOR_S[WARM_UP - 1]) / steps,
        "idle_s": idle_parts(counted),
        "turns_per_episode": statistics.mean(line["rollout/turns"] for line in own),
        "own_times": {name: statistics.median(line.get(name, 0.0) for line in own) for name in names},
        "load": os.getloadavg()[0],
    }


def words_of(options: argparse.Namespace, staleness: int, folder: Path) -> list[str]:
    """Return the words of `roll-train`: the example's settings, with no evaluation and a model that nothing asks."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    del config["evaluation"]
    (folder.parent / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return [
        *("--config", str(folder.parent / "run.yaml")),
        "model={path: null, hidden_size: 16, layers: 1, heads: 1, max_length: 512, device: cpu}",
        f"output_dir={folder}",
        f"steps={options.steps}",
        f"rollout.max_staleness={staleness}",
        f"rollout.groups_per_step={options.groups}",
        "checkpoint={every: 1000, keep: 1, resume: never}",
        "tracking={tensorboard: false, console: false}",
        *options.words,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decode-ms", type=float, default=5.0)
    parser.add_argument("--prompts-ms", type=float, default=10.0)
    parser.add_argument("--train-s", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16, help="of eight episodes, in each step")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further settings of the run")
    options = parser.parse_intermixed_args()
    if options.here is not None:
        return _one(options)
    results = {}
    for staleness in options.staleness:
        with tempfile.TemporaryDirectory() as folder:
            here = ["--here", folder, "--staleness", str(staleness)]
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *here], stdout=subprocess.PIPE)
            if done.returncode:
                return done.returncode
            found = json.loads((Path(folder) / "figures.json").read_text())
        results[f"staleness {staleness}"] = found
        idle = ", ".join(f"{part} {seconds:.3f}" for part, seconds in found["idle_s"].items())
        print(
            f"staleness {staleness}: device busy {found['busy']:.1%}, {found['episodes_per_s']:.1f} episodes a second, "
            f"{found['step_s']:.2f} s a step; it waits during {idle}; the trainer's process takes "
            f"{found['processor_s']:.2f} s of a processor",
            flush=True,
        )
    if options.output:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": revision(),
            "pace": {name: getattr(options, name) for name in ("decode_ms", "prompts_ms", "train_s")},
            "episodes_per_step": 8 * options.groups,
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _one(options: argparse.Namespace) -> int:
    folder = options.here / "run"
    pace = Pace(options.decode_ms / 1000, options.prompts_ms / 1000, options.train_s)
    code = run_here(pace, words_of(options, options.staleness[-1], folder))
    if not code:
        found = figures(folder, 8 * options.groups)
        (options.here / "figures.json").write_text(json.dumps(found), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
