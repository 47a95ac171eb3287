"""What a training step and a decoding step launch and allocate, counted by torch's profiler: on any device the same.

    python benchmarks/training/launches.py --output benchmarks/results/launches.json
    python benchmarks/training/launches.py --before ../before --output ...   # and of another checkout beside it

An operation is a leaf of the profiler's tree that computes: views and empty tensors are none, and what a device does
for many tensors in one kernel (`_foreach_...`, `_fused_...`) is one; so is each kernel that inductor has made. An
allocation is one that the profiler's memory log has. The model has the layers of Qwen2.5's 0.5B, so that it launches as
often, and narrow ones, so that a processor can run them. Rows are packed as on a device that has a kernel for it: here
one call of attention stands in its place, whose numbers mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.slot_batch import SlotBatch
from rollgym.trainer.models.weights import without_chance

ROOT = Path(__file__).parents[2]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 56,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
ROWS, TOKENS, BUDGET = 32, 64, 1024
_NOTHING = (
    "empty",
    "as_strided",
    "view",
    "slice",
    "select",
    "transpose",
    "expand",
    "squeeze",
    "detach",
    "alias",
)
_NOTHING += (
    "resize_",
    "split",
    "unbind",
    "lift_fresh",
    "permute",
    "narrow",
    "unfold",
    "chunk",
    "reshape",
    "numpy_T",
)
_NAMES = {
    f"aten::{name}" for name in (*_NOTHING, "t", "empty_like", "empty_strided", "unsqueeze", "_unsafe_view")
}
_TOGETHER = ("aten::_foreach_", "aten::_fused_")


def model_of() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return without_chance(Qwen2ForCausalLM(Qwen2Config(**SHAPE)))  # type: ignore[return-value]


def batch(*, alike: bool) -> list[TrainRow]:
    """Rows of one length, or of lengths from an eighth of it on; of either the same number."""
    draws = torch.Generator().manual_seed(0)
    rows = []
    for number in range(ROWS):
        length = TOKENS if alike else TOKENS // 8 + (TOKENS * 7 // 8) * number // (ROWS - 1)
        ids = torch.randint(3, SHAPE["vocab_size"], (length,), generator=draws)
        rows.append(TrainRow(ids, torch.arange(length) >= length // 2, {"advantages": torch.randn(length)}))
    return rows


def policy_gradient(micro: Any) -> Any:
    return -(micro.outputs * micro.fields["advantages"] * micro.mask).sum() / 1000, {}


def training(
    *, alike: bool, dtype: torch.dtype, compiled: str | None = None, **options: Any
) -> dict[str, Any]:
    """Count one training step, the third."""
    packs = options.get("packed_rows") == "on" and "packed_rows" in OptimizerSettings.model_fields
    if not packs:
        options.pop("packed_rows", None)
    settings = OptimizerSettings(
        learning_rate=1e-5, shared_prefixes="off", tokens_per_micro_batch=BUDGET, **options
    )
    schedule = Schedule(1e-5, 0, 1, "constant")
    inductor_config.cpp.enable_kernel_profile = True  # its kernels have names for the profiler
    head = PolicyHead(model_of(), 1.0)
    backend = TorchBackend(head, settings, schedule, dtype=dtype, compiled=compiled)
    rows = batch(alike=alike)
    with one_call_of_attention() if packs else nullcontext():
        for _ in range(2):
            backend.step(rows, policy_gradient, entropy="metric")
        counted = count(lambda: backend.step(rows, policy_gradient, entropy="metric"))
    return counted | {"tokens": sum(len(row.ids) for row in rows)}


@contextmanager
def one_call_of_attention() -> Iterator[None]:
    """Have one call of attention stand for a kernel of packed rows: as many launches, other numbers."""
    from rollgym.trainer.models import packed_attention  # not in every checkout

    def one_call(module: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    before = packed_attention._by_stretches
    packed_attention._by_stretches = one_call
    try:
        yield
    finally:
        packed_attention._by_stretches = before


def decoding() -> dict[str, Any]:
    """Count one decoding step of 64 rows."""
    slots = SlotBatch(model_of().to(torch.bfloat16), 64, 256)
    slots.advance(
        [GenerationRequest(f"r{n}", list(range(3, 40)), SamplingParams(64), seed=n) for n in range(64)], 0
    )
    slots.advance([], 0)
    return count(lambda: slots.advance([], 0))


def count(step: Any) -> dict[str, Any]:
    """Run something under the profiler, and return what it launched and allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        step()
    operations = sum(operations_of(event) for event in measured.events() if event.cpu_parent is None)
    assert measured.profiler is not None
    log = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = [event.nbytes() for event in log if event.nbytes() > 0]
    return {
        "operations": operations,
        "allocations": len(taken),
        "allocated_mib": round(sum(taken) / 2**20, 1),
    }


def operations_of(event: Any) -> int:
    """Count the operations at or below an event of the profiler."""
    if event.name.startswith(_TOGETHER):
        return 1
    inner = sum(operations_of(child) for child in event.cpu_children)
    if "cpp_fused" in event.name:
        return 1
    if inner or not event.name.startswith("aten::"):
        return inner
    return int(event.name not in _NAMES)


CASES: dict[str, Any] = {
    "training, bf16, rows of one length": lambda: training(alike=True, dtype=torch.bfloat16),
    "training, bf16, rows of unlike lengths": lambda: training(
        alike=False, dtype=torch.bfloat16, packed_rows="on"
    ),
    "training, bf16, rows of one length, compiled layers": lambda: training(
        alike=True, dtype=torch.bfloat16, compiled="inductor", fused=True
    ),
    "training, fp32, rows of one length": lambda: training(alike=True, dtype=torch.float32),
    "decoding, bf16, 64 rows": decoding,
}


def counted(names: Sequence[str]) -> dict[str, Any]:
    return {name: CASES[name]() for name in names}


def of_checkout(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Count the same with the modules of another checkout."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--inner", "--only", *names],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout, to be counted beside this one")
    parser.add_argument("--before-commit", help="its commit, where it has no history")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inner:
        print(json.dumps(counted(options.only)))
        return
    record = {
        "command": "python benchmarks/training/launches.py",
        "commit": revision(),
        "torch": torch.__version__,
        "model": SHAPE,
        "rows": ROWS,
        "micro_batch_tokens": BUDGET,
        "results": of_checkout(ROOT, options.only),
    }
    if options.before is not None:
        record |= {
            "before_commit": options.before_commit,
            "before": of_checkout(options.before, options.only),
        }
    print(json.dumps(record, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
