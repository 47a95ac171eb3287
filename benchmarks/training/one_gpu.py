"""Training steps of a model of about 0.5B random weights on one accelerator, in each way that torch has for it.

    python benchmarks/training/one_gpu.py --output benchmarks/results/one_gpu.json
    python benchmarks/training/one_gpu.py --trl trl-venv/bin/python ...     # TRL beside it, at equal settings
    python benchmarks/training/one_gpu.py --tiny                            # any machine: does each case run?
    python benchmarks/training/tables.py                                    # writes docs/results_speed.md anew from it

Each case is a process of its own, so that the memory that it takes is its own: a policy gradient on a batch of 4 groups
of 8 episodes (512 tokens of prompt, 512 sampled), in bfloat16 from weights in float32, AdamW. Measured are tokens
trained a second, the peak of the device's memory, and model FLOPs utilisation: operations by the model's mathematics,
as trainer/learn/utilisation.py counts them, of the device's peak. `generation` samples with the embedded engine. What
cannot run here is written down with why.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.backends.base import MicroBatch, TrainRow
from rollgym.trainer.backends.fsdp2 import fsdp2_backend
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape, RankGroup, listen
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.backends.zero import zero_backend
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.learn.utilisation import accelerator_named, device_name, training_flops, utilisation
from rollgym.trainer.models.load import set_attention
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.models.shape import ModelShape
from rollgym.trainer.models.weights import without_chance

ROOT = Path(__file__).parents[2]
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TINY = SHAPE | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPS, MEMBERS = 4, 8

CASES: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager attention": {"attention": "eager"},
    "flash attention": {"attention": "flash_attention_2"},
    "fused AdamW": {"fused": True},
    "compiled layers": {"compiled": "inductor"},
    "compiled layers, fused AdamW": {"compiled": "inductor", "fused": True},
    "packed rows": {"packed_rows": "auto"},
    "all that is chosen by itself": {
        "compiled": "inductor",
        "fused": True,
        "packed_rows": "auto",
        "shared_prefixes": "auto",
    },
    "gradient checkpointing": {"gradient_checkpointing": True},
    "shared prefixes": {"shared_prefixes": "auto"},
    "adapters of rank 32": {"lora": 32},
    "fsdp2, one rank": {"kind": "fsdp2"},
    "fsdp2, cpu_offload": {"kind": "fsdp2", "cpu_offload": True},
    "fsdp2, compiled layers, fused AdamW": {"kind": "fsdp2", "compiled": "inductor", "fused": True},
    "ZeRO 2, one rank": {"kind": "zero2"},
    "ZeRO 3, cpu_offload": {"kind": "zero3", "cpu_offload": True},
    "generation": {"generates": True},
}
"""What differs from the first one."""


def model_of(options: argparse.Namespace) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**(TINY if options.tiny else SHAPE))
    return without_chance(Qwen2ForCausalLM(config))  # type: ignore[return-value]


def batch(options: argparse.Namespace) -> list[TrainRow]:
    """Rows, and an advantage for each."""
    draws = torch.Generator().manual_seed(0)
    prompt, reply = (6, 8) if options.tiny else (options.prompt, options.reply)
    size = TINY["vocab_size"] if options.tiny else SHAPE["vocab_size"]
    rows = []
    for _ in range(GROUPS):
        asked = torch.randint(3, size, (prompt,), generator=draws)
        for _ in range(MEMBERS):
            ids = torch.cat([asked, torch.randint(3, size, (reply,), generator=draws)])
            mask = torch.arange(len(ids)) >= prompt
            advantages = torch.randn((), generator=draws) * mask
            rows.append(TrainRow(ids, mask, {"advantages": advantages}))
    return rows


def policy_gradient(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    share = -(micro.outputs * micro.fields["advantages"] * micro.mask).sum() / 1000
    return share, {}


def stepper(case: dict[str, Any], options: argparse.Namespace, rows: list[TrainRow]) -> Any:
    """Return what takes one optimizer step on the rows."""
    device = torch_device(options.device)
    model = model_of(options)
    own = {name: case[name] for name in ("compiled", "gradient_checkpointing") if name in case}
    if "compiled" in own:
        own["compiled"] = options.compile
    settings = OptimizerSettings(
        learning_rate=1e-5,
        fused=case.get("fused", False),
        shared_prefixes=case.get("shared_prefixes", "off"),
        packed_rows=case.get("packed_rows", "off"),
        tokens_per_micro_batch=options.micro_batch_tokens,
    )
    schedule = Schedule(1e-5, 0, 1, "constant")
    if "lora" in case:
        add_lora(model, LoraSettings(rank=case["lora"]), 0)
    kind = case.get("kind")
    if kind is None:
        model.to(device)
        set_attention([model], case.get("attention"))
        backend = TorchBackend(PolicyHead(model, 1.0), settings, schedule, dtype=torch.bfloat16, **own)
        return lambda: backend.step(rows, policy_gradient, entropy="metric")
    store, address = listen("127.0.0.1", 1)
    group = RankGroup(0, 0, MeshShape(), options.device, address, store, 600.0)
    own |= {"dtype": torch.bfloat16, "cpu_offload": case.get("cpu_offload", False)}
    head = PolicyHead(model, 1.0)
    if kind == "fsdp2":
        rank = fsdp2_backend(head, group, settings, schedule, **own)
    else:
        rank = zero_backend(head, group, settings, schedule, stage=int(kind[-1]), **own)
    return lambda: rank.step(rows, range(len(rows)), policy_gradient, "metric", False)


def trained(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return what steps take."""
    device = torch_device(options.device)
    rows = batch(options)
    step = stepper(case, options, rows)
    seconds = []
    report = None
    for number in range(options.rounds + options.warm_up):
        begun = time.perf_counter()
        report = step()
        synchronize(device)
        if number >= options.warm_up:
            seconds.append(time.perf_counter() - begun)
    assert report is not None
    assert report.applied
    took = statistics.median(seconds)
    tokens = sum(len(row.ids) for row in rows)
    shape = ModelShape.from_config(Qwen2Config(**(TINY if options.tiny else SHAPE)).to_dict())
    lengths = [(len(row.ids), int(row.mask.sum())) for row in rows]
    flops = training_flops(shape, lengths, frozen="lora" in case)
    known = accelerator_named(device_name(device))
    return {
        "step_s": round(took, 4),
        "tokens_per_s": round(tokens / took, 1),
        "computed_share": round(report.tokens.computed / report.tokens.rows, 3),
        "peak_gib": peak_gib(device),
        "model_tflops_per_s": round(flops / took / 1e12, 3),
        "mfu": None if known is None else round(utilisation(flops, took, known.bf16_tflops), 4),
    }


def generated(options: argparse.Namespace) -> dict[str, Any]:
    """Return how fast the embedded engine samples."""
    device = torch_device(options.device)
    model = model_of(options).to(device, torch.bfloat16)
    rows, length = (8, 8) if options.tiny else (64, 256)
    prompt = batch(options)[0].ids[: 6 if options.tiny else options.prompt].tolist()

    async def sample() -> float:
        async with TorchEngine(model, max_rows=rows, max_length=4096, shares_weights=True) as engine:
            for _ in range(2):  # the first one warms up
                begun = time.perf_counter()
                asked = [
                    GenerationRequest(f"r{number}", prompt, SamplingParams(length), seed=number)
                    for number in range(rows)
                ]
                replies = await engine.generate_together(asked)
                synchronize(device)
                took = time.perf_counter() - begun
            return sum(len(reply.token_ids) for reply in replies) / took

    return {"generated_tokens_per_s": round(asyncio.run(sample()), 1), "peak_gib": peak_gib(device)}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def peak_gib(device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    return round(torch.accelerator.max_memory_allocated() / 2**30, 2)


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case, and return its figures or why there are none."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"not_run": f"it took more than {options.timeout:g} s"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        return {"not_run": errors[-1][:300] if errors else f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def beside_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Run TRL and us in turns at these settings, in TRL's environment."""
    output = options.output.with_suffix(".trl.json")
    words = ["--device", options.device, "--dtype", "bf16", "--rounds", str(options.rounds), "--output"]
    shape = ["--hidden", "896", "--layers", "24", "--heads", "14", "--vocabulary", "151936"]
    lengths = ["--prompt", str(options.prompt), "--completion", str(options.reply)]
    script = str(ROOT / "benchmarks/training/beside_trl.py")
    command = [options.trl, script, *words, str(output), *shape, *lengths]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if subprocess.run(command, cwd=ROOT, env=environment, timeout=options.timeout).returncode:
        return {"not_run": "beside_trl.py failed: see above"}
    result: dict[str, Any] = json.loads(output.read_text())["results"]
    output.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--reply", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--compile", default="inductor", help="backend of the cases that compile")
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.case is not None:
        case = CASES[options.case]
        print(json.dumps(generated(options) if case.get("generates") else trained(case, options)))
        return
    commit = revision()
    results: dict[str, Any] = {}
    for name in [*options.only, *(["beside TRL"] if options.trl else [])]:
        results[name] = beside_trl(options) if name == "beside TRL" else in_a_process(name, options)
        print(name, json.dumps(results[name]), flush=True)
        if options.output is not None:  # after each, so that one that is stopped has measured something
            record = {
                "command": " ".join(["python", *sys.argv]),
                "commit": commit,
                "device": device_name(torch_device(options.device)) or "a processor",
                "torch": torch.__version__,
                "model": TINY if options.tiny else SHAPE,
                "load_average": round(os.getloadavg()[0], 2),
                "results": results,
            }
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
