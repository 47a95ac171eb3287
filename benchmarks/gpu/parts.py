"""What is measured on a GPU, in order of worth: each part is a program of its own, with a limit of time."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Qwen2.5's shape of 0.5B, as options of beside_trl.py; rows of 512 tokens that were asked and 512 that were sampled.
_HALF_A_BILLION = ("--hidden", "896", "--layers", "24", "--heads", "14", "--vocabulary", "151936")
_LONG_ROWS = ("--prompt", "512", "--completion", "512")
_TINY_ROWS = ("--hidden", "32", "--layers", "2", "--heads", "2", "--vocabulary", "512")
_SHORT_ROWS = ("--prompt", "16", "--completion", "16")
_TRAINED_ON_A_PROCESSOR = ("sdpa", "shared prefixes")
_TRAINED = (
    *_TRAINED_ON_A_PROCESSOR,
    "all that is chosen by itself",
    "compiled layers, fused AdamW",
    "packed rows",
    "fused AdamW",
    "flash attention",
    "gradient checkpointing",
)


@dataclass(frozen=True)
class Place:
    """Where parts run.

    Attributes:
        tiny: Whether there is no accelerator: models are tiny, and cases few.
        model: Folder or file of a small instruct model; None where there is none.
        work: Folder for what parts write.
        seconds: How long the part may take.
    """

    tiny: bool
    model: Path | None
    work: Path
    seconds: float

    def result(self, name: str) -> Path:
        """Return the JSON file that a part writes."""
        return self.work / f"{name}.json"


@dataclass(frozen=True)
class Part:
    """One program.

    Attributes:
        name: Of the part; its figures stand in `NAME.json` of the work folder, if it writes any.
        about: What it shows.
        limit_s: Seconds that it may take on an accelerator.
        least_s: With fewer seconds left, it is not begun.
        command: Its words, given the place.
        missing: Says what it needs and what is not there; empty if all is.
    """

    name: str
    about: str
    limit_s: float
    least_s: float
    command: Callable[[Place], Sequence[str]]
    missing: Callable[[Place], str] = lambda place: ""


def _needs_model(place: Place) -> str:
    return "" if place.model or place.tiny else "no model: --model FOLDER, or pack one"


def _needs_trl(place: Place) -> str:
    return "" if _importable("trl") else "TRL is not installed here"


def _needs_vllm(place: Place) -> str:
    return _needs_model(place) or ("" if shutil.which("vllm") else "no program vllm")


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _tests(place: Place) -> Sequence[str]:
    files = ("test_kernels.py", "test_shared_prefixes.py")
    chosen = "accelerator or cuda" if not place.tiny else "fused"
    paths = [str(ROOT / "tests/trainer/backends" / file) for file in files[: 1 if place.tiny else 2]]
    own = ("-q", "-p", "no:cacheprovider", "-n", "0")
    return (sys.executable, "-m", "pytest", *own, *paths, "-k", chosen)


def _training(place: Place) -> Sequence[str]:
    script = str(ROOT / "benchmarks/training/one_gpu.py")
    own = ("--tiny", "--rounds", "1", "--warm-up", "1") if place.tiny else ("--rounds", "4")
    cases = _TRAINED_ON_A_PROCESSOR if place.tiny else _TRAINED
    return (sys.executable, script, *own, "--output", str(place.result("training")), "--only", *cases)


def _sampling(place: Place) -> Sequence[str]:
    script = str(ROOT / "benchmarks/training/decoding.py")
    own = ("--tiny",) if place.tiny else ()
    minutes = f"{0.6 * place.seconds / 60:.1f}"
    return (sys.executable, script, *own, "--minutes", minutes, "--output", str(place.result("sampling")))


def _beside_trl(lengths: str) -> Callable[[Place], Sequence[str]]:
    def command(place: Place) -> Sequence[str]:
        script = str(ROOT / "benchmarks/training/beside_trl.py")
        shape = (*_TINY_ROWS, *_SHORT_ROWS) if place.tiny else (*_HALF_A_BILLION, *_LONG_ROWS)
        dtype = "fp32" if place.tiny else "bf16"
        output = str(place.result(f"beside_trl_{lengths}"))
        words = ("--device", "auto", "--dtype", dtype, "--rounds", "1" if place.tiny else "3")
        return (sys.executable, script, *words, "--cases", lengths, *shape, "--output", output)

    return command


def _of_runs(
    script: str, name: str, own: Sequence[str] = (), tiny: Sequence[str] = ()
) -> Callable[[Place], Sequence[str]]:
    """Return the command of a script of runs, with words of its own and others where there is no accelerator."""

    def command(place: Place) -> Sequence[str]:
        words = ["--seconds", f"{place.seconds:.0f}", "--work", str(place.work / name), *own]
        words += ["--output", str(place.result(name)), *(["--tiny", *tiny] if place.tiny else [])]
        words += ["--model", str(place.model)] if place.model else []
        return (sys.executable, str(HERE / script), *words)

    return command


def _seed(number: int) -> Part:
    words = ("--seed", str(number))
    command = _of_runs("learning.py", f"learning_{number}", words, ("--only", "FrozenLake"))
    return Part(f"learning_{number}", f"the same, seed {number}", 270, 90, command, _needs_model)


def _vllm(place: Place) -> Sequence[str]:
    script = str(ROOT / "examples/one_gpu/run.py")
    words = ("--model", str(place.model), "--steps", "3", "--output", str(place.work / "vllm"))
    return (sys.executable, script, *words, "--only", "vllm", "vllm_async")


PARTS = (
    Part("tests", "the accelerator's results beside the processor's", 100, 30, _tests),
    Part("training", "a training step of 0.5B in each way: tokens a second, MFU, memory", 150, 40, _training),
    Part("sampling", "the embedded engine at 64 and 256 rows, and `generate`", 150, 25, _sampling),
    Part("beside_trl_equal", "TRL, rows of equal lengths", 75, 40, _beside_trl("equal"), _needs_trl),
    Part("beside_trl_padded", "TRL, rows of unequal lengths", 75, 40, _beside_trl("padded"), _needs_trl),
    Part(
        "learning",
        "runs of a small instruct model",
        270,
        90,
        _of_runs("learning.py", "learning"),
        _needs_model,
    ),
    Part("backends", "a rank of each backend", 180, 60, _of_runs("backends.py", "backends"), _needs_model),
    _seed(1),
    _seed(2),
    Part(
        "learning_rate",
        "FrozenLake at three times its learning rate: does it say so?",
        120,
        60,
        _of_runs("learning.py", "learning_rate", ("--rate", "3", "--only", "FrozenLake")),
        _needs_model,
    ),
    Part(
        "preset",
        "examples/presets/qwen2.5-0.5b-1gpu.yaml, a model of that shape of random weights",
        240,
        90,
        _of_runs("preset.py", "preset"),
        _needs_model,
    ),
    Part("vllm", "vLLM beside the trainer", 240, 90, _vllm, _needs_vllm),
)
