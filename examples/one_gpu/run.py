"""Train a small model in every way that one GPU allows, and write down what came of it.

    python examples/one_gpu/run.py                      # what can be run here is run, what is missing is named
    python examples/one_gpu/run.py --check              # only say what is here
    python examples/one_gpu/run.py --vllm /opt/vllm/bin/vllm --model Qwen/Qwen2.5-1.5B-Instruct
    python examples/one_gpu/run.py --tiny               # the embedded cases with random weights, on any machine

Each case is a run of `roll-train` of its own, in a folder under --output; `results.json` there holds a line for each.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trainer.config.checks import check_model_path
from trainer.core.errors import ConfigError
from trainer.models.load import model_folder

HERE = Path(__file__).resolve().parent
_SERVER = "inference={kind: vllm, launch: {command: [VLLM], memory_fraction: FRACTION}SLEEP}"
_LORA = ["model.lora={rank: 32, alpha: 64}", "optimizer.learning_rate=1.0e-5"]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        config: The file that it begins with.
        words: Settings laid over it.
        needs: What must be here: `accelerator`, `vllm`, `peft`.
        about: What it shows.
    """

    config: str
    words: tuple[str, ...]
    needs: frozenset[str]
    about: str


def _case(config: str, about: str, *words: str, vllm: str = "", lora: bool = False) -> Case:
    needs = {"accelerator"} | ({"peft"} if lora else set())
    added = [*_LORA, *words] if lora else list(words)
    if vllm:
        needs.add("vllm")
        sleeping = vllm == "sleeps"
        added.append(
            _SERVER.replace("FRACTION", "0.6" if sleeping else "0.35").replace(
                "SLEEP", ", sleep_level: 1" if sleeping else ""
            )
        )
        added.append(f"weights={{transport: {'adapter' if lora else 'disk'}}}")
    return Case(config, tuple(added), frozenset(needs), about)


CASES = {
    "embedded": _case("frozen_lake.yaml", "bf16, the engine shares the weights that are trained"),
    "embedded_async": _case(
        "frozen_lake.yaml", "bf16, staleness 1: the engine has weights of its own", "rollout.max_staleness=1"
    ),
    "embedded_lora": _case("frozen_lake.yaml", "adapters; the reference is the model without", lora=True),
    "arithmetic": _case("arithmetic.yaml", "single turns with long replies, checked answers"),
    "vllm": _case("frozen_lake.yaml", "vLLM beside the trainer, asleep while it trains", vllm="sleeps"),
    "vllm_async": _case(
        "frozen_lake.yaml", "vLLM samples while the trainer trains", "rollout.max_staleness=1", vllm="awake"
    ),
    "vllm_lora": _case("frozen_lake.yaml", "only adapters travel to vLLM", vllm="awake", lora=True),
    "vllm_arithmetic_async": _case(
        "arithmetic.yaml", "long replies, sampled while training", "rollout.max_staleness=1", vllm="awake"
    ),
}
_TINY = (
    "model={path: null, hidden_size: 32, layers: 1, heads: 2, max_length: 512}",
    "model.dtype=bf16",
    "model.gradient_checkpointing=true",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "evaluation.panels={}",
    "tracking={tensorboard: false, console: false}",
)


def missing(model: str | None, vllm: str) -> dict[str, str]:
    """Return what is not here, and how it is had.

    Args:
        model: Folder or name of the model; None where random weights do, on any machine.
        vllm: The vllm program.
    """
    gone = {}
    if model is not None and not torch.accelerator.is_available():
        gone["accelerator"] = "torch finds none: install the build of torch for yours (torch.accelerator)"
    if shutil.which(vllm) is None:
        gone["vllm"] = f"no program {vllm}: install vLLM in an environment of its own and name it with --vllm"
    if find_spec("peft") is None:
        gone["peft"] = "pip install 'rollgym[lora]'"
    if model is not None:
        try:
            check_model_path(model)
            model_folder(model, fetch=False)
        except ConfigError as error:
            gone["model"] = str(error)
    return gone


def run(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case to its end and return what its records say."""
    directory = options.output / name
    words = [*case.words, f"output_dir={directory}", f"steps={options.steps}", "checkpoint.resume=auto"]
    words = [word.replace("VLLM", options.vllm) for word in words]
    words[:0] = _TINY if options.tiny else [f"model.path={options.model}"]
    started = time.monotonic()
    command = [sys.executable, "-m", "trainer.cli", "--config", str(HERE / case.config), *words]
    code = subprocess.run(command, env=os.environ, check=False).returncode
    result: dict[str, Any] = {
        "about": case.about,
        "exit_code": code,
        "seconds": round(time.monotonic() - started),
    }
    records = directory / "metrics.jsonl"
    if records.exists():
        result |= summary([json.loads(line) for line in records.read_text().splitlines()])
    return result


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run: first and last success, and the means of what a step costs."""
    success = [line["rollout/success"] for line in lines if "rollout/success" in line]
    kept: dict[str, Any] = {"steps": len(success)}
    if success:
        kept |= {"success_first": success[0], "success_last": success[-1]}
    for key in ("time/step_s", "time/tokens_per_s", "mismatch/k3", "sync/seconds", "rollout/lag_mean"):
        values = [line[key] for line in lines if key in line]
        if values:
            kept[key] = sum(values) / len(values)
    return kept


def main() -> int:
    """Say what is here, run what can be run, and write down the rest as not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="folder, or name on the hub")
    parser.add_argument("--vllm", default="vllm", help="the vllm program")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each case")
    parser.add_argument("--output", type=Path, default=Path("runs/one_gpu"))
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--check", action="store_true", help="only say what is here and what is not")
    parser.add_argument("--tiny", action="store_true", help="random weights, no accelerator, no vLLM")
    options = parser.parse_args()

    gone = missing(None if options.tiny else options.model, options.vllm)
    for what, how in gone.items():
        print(f"missing: {what}: {how}", flush=True)
    results: dict[str, Any] = {}
    for name in options.only:
        case = CASES[name]
        needs = {each for each in case.needs if each in gone} | ({"model"} & gone.keys())
        if needs or options.check:
            state = f"not run, for want of {', '.join(sorted(needs))}" if needs else "can be run"
            results[name] = {"about": case.about, "state": state}
        else:
            results[name] = run(name, case, options) | {"state": "run"}
        print(f"{name}: {results[name]['state']} ({case.about})", flush=True)
    if not options.check:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"results: {options.output / 'results.json'}")
    if any(result.get("exit_code") for result in results.values()):
        return 1
    return 3 if any(result["state"].startswith("not run") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
