"""Train a small model in every way that one GPU allows, and write down what came of it.

    python examples/one_gpu/run.py                      # what can be run here is run, what is missing is named
    python examples/one_gpu/run.py --check              # only say what is here
    python examples/one_gpu/run.py --vllm /opt/vllm/bin/vllm --model Qwen/Qwen2.5-1.5B-Instruct
    python examples/one_gpu/run.py --sglang /opt/sglang/bin/python   # a Python that has SGLang, for its cases
    python examples/one_gpu/run.py --built              # nothing is fetched: a policy is built here, and learns
    python examples/one_gpu/run.py --tiny               # the embedded cases with random weights, on any machine
    python examples/one_gpu/run.py --dry-run            # print each case's command and settings, and run nothing

Each case is a run of `roll-train` of its own, in a folder under --output; `results.json` there holds a line for each.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from rollgym import ConfigError, load_settings, model_folder

HERE = Path(__file__).resolve().parent
_COMMANDS = {"vllm": "[VLLM]", "sglang": "[SGLANG, -m, sglang.launch_server]"}
_LORA = ["model.lora={rank: 32, alpha: 64}", "optimizer.learning_rate=1.0e-5"]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        config: The file that it begins with.
        words: Settings laid over it.
        needs: What must be here: `accelerator`, `vllm`, `sglang`, `peft`, `openai`.
        about: What it shows.
    """

    config: str
    words: tuple[str, ...]
    needs: frozenset[str]
    about: str


def _case(
    config: str, about: str, *words: str, server: str = "", sleeps: bool = False, lora: bool = False
) -> Case:
    """Return a case.

    Args:
        config: The file that it begins with.
        about: What it shows.
        words: Settings that are its own.
        server: What samples: `vllm` or `sglang`; the embedded engine if empty.
        sleeps: Whether the server sleeps while the policy is trained.
        lora: Whether adapters are trained.
    """
    added: list[str] = [*_LORA] if lora else []
    if server:
        launch = f"{{command: {_COMMANDS[server]}, memory_fraction: {0.6 if sleeps else 0.35}}}"
        sleeping = ", sleep_level: 1" if sleeps else ""
        added.append(f"inference={{kind: {server}, launch: {launch}{sleeping}}}")
        added.append(f"weights={{transport: {'adapter' if lora else 'disk'}}}")
    needs = {"accelerator", *([server] if server else []), *(["peft"] if lora else [])}
    needs |= {"openai"} if any(word.startswith("rollout.agent=") for word in words) else set()
    return Case(config, (*added, *words), frozenset(needs), about)


_ASYNC = "rollout.max_staleness=1"
_FP8 = ("inference.quantization=fp8", "algorithm.correction={kind: truncate}")
_LONG = ("prompt={context: full_history}", "rollout.max_new_tokens=256", "model.max_length=4096")
_AGENT = "rollout.agent='PYTHON EXAMPLES/black_box_agent.py'"

CASES = {
    "embedded": _case("frozen_lake.yaml", "bf16, the engine shares the weights that are trained"),
    "embedded_async": _case(
        "frozen_lake.yaml", "bf16, staleness 1: the engine has weights of its own", _ASYNC
    ),
    "embedded_lora": _case("frozen_lake.yaml", "adapters; the reference is the model without", lora=True),
    "arithmetic": _case("arithmetic.yaml", "single turns with long replies, checked answers"),
    "compaction": _case(
        "frozen_lake.yaml",
        "the policy sums up its own history",
        "prompt={context: compaction, compact_above: 200, summary_tokens: 64}",
    ),
    "thinking": _case(
        "frozen_lake.yaml",
        "thinking on, the whole history: what the template drops of it costs segments",
        *_LONG,
        "prompt.template_kwargs={enable_thinking: true}",
    ),
    "thinking_kept": _case(
        "frozen_lake.yaml",
        "thinking on, and a template that keeps it: one segment",
        *_LONG,
        "prompt.template_kwargs={enable_thinking: true}",
        "prompt.chat_template=HERE/keeps_thinking.jinja",
    ),
    "agent": _case("frozen_lake.yaml", "an agent on the openai library, a program for each episode", _AGENT),
    "vllm": _case(
        "frozen_lake.yaml", "vLLM beside the trainer, asleep while it trains", server="vllm", sleeps=True
    ),
    "vllm_async": _case("frozen_lake.yaml", "vLLM samples while the trainer trains", _ASYNC, server="vllm"),
    "vllm_keep": _case(
        "frozen_lake.yaml",
        "replies go on with old keys and values behind an update (vLLM 0.33)",
        _ASYNC,
        "weights.pause=keep",
        server="vllm",
    ),
    "vllm_recompute": _case(
        "frozen_lake.yaml",
        "replies go on with keys and values that are computed again (vLLM 0.33)",
        _ASYNC,
        "weights.pause=recompute",
        server="vllm",
    ),
    "vllm_lora": _case("frozen_lake.yaml", "only adapters travel to vLLM", server="vllm", lora=True),
    "vllm_fp8": _case("frozen_lake.yaml", "vLLM samples in fp8, corrected", *_FP8, server="vllm"),
    "vllm_agent": _case("frozen_lake.yaml", "an agent, answered by vLLM", _AGENT, _ASYNC, server="vllm"),
    "vllm_arithmetic_async": _case(
        "arithmetic.yaml", "long replies, sampled while training", _ASYNC, server="vllm"
    ),
    "sglang": _case(
        "frozen_lake.yaml", "SGLang beside the trainer, asleep while it trains", server="sglang", sleeps=True
    ),
    "sglang_async": _case(
        "frozen_lake.yaml", "SGLang samples while the trainer trains", _ASYNC, server="sglang"
    ),
    "sglang_keep": _case(
        "frozen_lake.yaml", "its pause in_place", _ASYNC, "weights.pause=keep", server="sglang"
    ),
    "sglang_recompute": _case(
        "frozen_lake.yaml", "its pause retract", _ASYNC, "weights.pause=recompute", server="sglang"
    ),
    "sglang_lora": _case("frozen_lake.yaml", "only adapters travel to SGLang", server="sglang", lora=True),
    "sglang_fp8": _case("frozen_lake.yaml", "SGLang samples in fp8, corrected", *_FP8, server="sglang"),
}
_BUILT_MODEL = (
    "model={path: null, hidden_size: 256, layers: 4, heads: 4, max_length: 512, dtype: bf16, "
    "gradient_checkpointing: true}"
)
_BUILT = ("prompt.instruction=none", "optimizer.learning_rate=3.0e-4", "rollout.max_new_tokens=4")
"""Behind what a case says: a policy that knows nothing but boards learns from larger steps, and answers in a word."""
_BUILT_START = "warm_start={demonstrations: 150, epochs: 2, batch_rows: 64, learning_rate: 1.0e-3}"
_TINY_MODEL = "model={path: null, hidden_size: 32, layers: 1, heads: 2}"
_TINY = (
    "model.max_length=512",
    "model.dtype=bf16",
    "model.gradient_checkpointing=true",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "evaluation.sets={}",
    "tracking={tensorboard: false, console: false}",
)


def missing(model: str | None, vllm: str, sglang: str) -> dict[str, str]:
    """Return what is not here, and how it is had.

    Args:
        model: Folder or name of the model; None where random weights do, on any machine.
        vllm: The vllm program.
        sglang: A Python that has SGLang.
    """
    gone = {}
    if model is not None and not torch.accelerator.is_available():
        gone["accelerator"] = "torch finds none: install the build of torch for yours (torch.accelerator)"
    if shutil.which(vllm) is None:
        gone["vllm"] = f"no program {vllm}: install vLLM in an environment of its own and name it with --vllm"
    if not _has_sglang(sglang):
        gone["sglang"] = (
            f"{sglang} has no SGLang: install it in an environment of its own; name its Python with --sglang"
        )
    if find_spec("openai") is None:
        gone["openai"] = "pip install openai: the agent of examples/black_box_agent.py speaks through it"
    if find_spec("peft") is None:
        gone["peft"] = "the extra 'lora' of rollgym: docs/installation.md has the line"
    if model is not None:
        try:
            model_folder(model, fetch=False)
        except ConfigError as error:
            gone["model"] = str(error)
    return gone


def _has_sglang(python: str) -> bool:
    if shutil.which(python) is None:
        return False
    asked = [python, "-c", "import sys, importlib.util as u; sys.exit(u.find_spec('sglang') is None)"]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def words_of(name: str, case: Case, options: argparse.Namespace) -> list[str]:
    """Return the settings of a case as they are written behind its file."""
    words = [
        *case.words,
        f"output_dir={options.output / name}",
        f"steps={options.steps}",
        "checkpoint.resume=auto",
    ]
    places = {
        "VLLM": options.vllm,
        "SGLANG": options.sglang,
        "PYTHON": sys.executable,
        "EXAMPLES": str(HERE.parent),
        "HERE": str(HERE),
    }
    for mark, place in places.items():
        words = [re.sub(rf"\b{mark}\b", lambda _, place=place: place, word) for word in words]
    # An agent makes its own prompts; how ours are made is read for expert games alone.
    prompts = ["prompt={}"] if "openai" in case.needs else []
    # A whole section takes the place of what stands in it, limits stand behind what a case asks.
    if options.tiny:
        return [_TINY_MODEL, *words, *_TINY, *prompts]
    if options.built:
        start = [_BUILT_START] if case.config == "frozen_lake.yaml" else []
        return [_BUILT_MODEL, *words, *_BUILT, *start]
    return [f"model.path={options.model}", *words, *prompts]


def command_of(name: str, case: Case, options: argparse.Namespace) -> list[str]:
    """Return the command line of a case."""
    words = words_of(name, case, options)
    return [sys.executable, "-m", "rollgym.trainer.cli", "--config", str(HERE / case.config), *words]


def show(name: str, case: Case, options: argparse.Namespace) -> None:
    """Print a case's command, and its settings as `roll-train` reads them.

    Raises:
        ConfigError: If they are refused.
    """
    settings = load_settings(HERE / case.config, words_of(name, case, options))
    said = settings.model_dump(mode="json", exclude_defaults=True)
    print(f"# {name}: {case.about} (needs {', '.join(sorted(case.needs))})")
    print(f"# {shlex.join(command_of(name, case, options))}")
    print(yaml.safe_dump({name: said}, sort_keys=False, default_flow_style=None, width=120), flush=True)


def run(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case to its end and return what its records say."""
    started = time.monotonic()
    code = subprocess.run(command_of(name, case, options), env=os.environ, check=False).returncode
    result: dict[str, Any] = {
        "about": case.about,
        "exit_code": code,
        "seconds": round(time.monotonic() - started),
    }
    records = options.output / name / "metrics.jsonl"
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
    parser.add_argument("--sglang", default=sys.executable, help="a Python that has SGLang")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each case")
    parser.add_argument("--output", type=Path, default=Path("runs/one_gpu"))
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--check", action="store_true", help="only say what is here and what is not")
    parser.add_argument(
        "--dry-run", action="store_true", help="print each case's command and settings, and run nothing"
    )
    built = parser.add_mutually_exclusive_group()
    built.add_argument(
        "--built",
        action="store_true",
        help="a policy of 4 million parameters that is built here and started on expert games, in place of --model",
    )
    built.add_argument("--tiny", action="store_true", help="random weights, no accelerator, no vLLM")
    options = parser.parse_args()
    if options.dry_run:
        for name in options.only:
            show(name, CASES[name], options)
        return 0

    fetched = None if options.tiny or options.built else options.model
    gone = missing(fetched, options.vllm, options.sglang)
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
