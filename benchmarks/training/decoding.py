"""Tokens a second of the embedded engine's decoding, beside what it had before slots and transformers' `generate`.

    python benchmarks/training/decoding.py --output benchmarks/results/decoding.json     # a GPU: 0.5B in bf16
    python benchmarks/training/decoding.py --device cpu --dtype fp32 --rows 1 16 --size small
    python benchmarks/training/decoding.py --tiny                                        # any machine: does it run?

All in one process, each contender in turns. `slots` are decoded in place, `one cache` is what families are decoded in
that have unusual caches. A decoding step is timed behind a prompt that all rows share, as members of a group do;
`next_turn_s` is what it takes to read on behind the replies, some tokens more in each row. Launches are operators of a
step that call no other, counted by torch's profiler: the same on each device, but that a CUDA graph is launched as one.
On a processor with other work, `--processor-time` counts that of one thread in place of the clock's. What fails is
written down with why, and what came so far is always written.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_gpu import SHAPE, TINY, peak_gib, synchronize
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.core.device import DTYPES, torch_device
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.decoding import ActiveBatch
from rollgym.trainer.inference.engine.slot_batch import SlotBatch
from rollgym.trainer.learn.utilisation import device_name
from rollgym.trainer.models.weights import place, without_chance

SMALL = SHAPE | {"vocab_size": 8192, "hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 12}
"""A model for a processor."""
SIZES = {"0.5B": SHAPE, "small": SMALL, "tiny": TINY}
_NEXT_TURN = 32


def model_of(options: argparse.Namespace, device: torch.device) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES[options.size])).eval()
    place(model, DTYPES[options.dtype], device)
    return without_chance(model)  # type: ignore[return-value]


def requests_of(prompts: list[list[int]], tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"r{number}", prompt, SamplingParams(tokens), seed=number)
        for number, prompt in enumerate(prompts)
    ]


def timed(work: Callable[[], Any], options: argparse.Namespace) -> tuple[Any, float]:
    clock = time.process_time if options.processor_time else time.perf_counter
    device = torch_device(options.device)
    synchronize(device)
    begun = clock()
    done = work()
    synchronize(device)
    return done, clock() - begun


def prompt_of(number: int, options: argparse.Namespace) -> list[int]:
    """Return a prompt that begins as no other does: what was read in one round must not be known in the next."""
    prompt: list[int] = torch.arange(number, number + options.prompt).remainder(50).add(3).tolist()
    return prompt


def engine(
    batch: ActiveBatch | SlotBatch, rows: int, number: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Play two turns of some rows, and return what each part took."""
    device = torch_device(options.device)
    prompt = prompt_of(number, options)
    asked = requests_of([prompt] * rows, options.reply)
    _, first = timed(lambda: batch.advance(asked, 0), options)
    drawn = [batch.drawn]
    seconds = []
    for _ in range(options.reply - 1):
        _, took = timed(lambda: batch.advance([], 0), options)
        seconds.append(took)
        drawn.append(batch.drawn)
    prompts = [[*prompt, *reply, *range(3, 3 + _NEXT_TURN)] for reply in zip(*drawn, strict=True)]
    _, following = timed(lambda: batch.advance(requests_of(prompts, 8), 0), options)
    batch.take(list(range(rows)))
    return {
        "tokens_per_s": round(rows * options.reply / (first + sum(seconds)), 1),
        "ms_per_decoding_step": round(1000 * statistics.median(seconds), 3),
        "first_token_s": round(first, 4),
        "next_turn_s": round(following, 4),
        "peak_gib": peak_gib(device),
    }


def launches(batch: ActiveBatch | SlotBatch, rows: int, options: argparse.Namespace) -> int:
    """Return the operators of one decoding step that no other calls."""
    batch.advance(requests_of([[3, 4, 5]] * rows, 9), 0)
    batch.advance([], 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        batch.advance([], 0)
    batch.take(list(range(rows)))
    return sum(each.name.startswith("aten::") and each.cpu_parent is None for each in profiled.events())


def generate(model: Qwen2ForCausalLM, rows: int, number: int, options: argparse.Namespace) -> dict[str, Any]:
    device = torch_device(options.device)
    ids = torch.tensor(prompt_of(number, options), device=device).repeat(rows, 1)
    config = GenerationConfig(
        max_new_tokens=options.reply,
        min_new_tokens=options.reply,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    _, took = timed(
        lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config), options
    )
    return {"tokens_per_s": round(rows * options.reply / took, 1), "peak_gib": peak_gib(device)}


def contenders(
    model: Qwen2ForCausalLM, rows: int, options: argparse.Namespace
) -> dict[str, Callable[[int], dict[str, Any]]]:
    longest = options.prompt + options.reply + _NEXT_TURN + 16
    slots, one_cache = SlotBatch(model, rows, longest), ActiveBatch(model)
    ways: dict[str, Callable[[int], dict[str, Any]]] = {
        "slots": lambda number: engine(slots, rows, number, options),
        "one cache": lambda number: engine(one_cache, rows, number, options),
        "generate": lambda number: generate(model, rows, number, options),
    }
    return {name: ways[name] for name in options.only}


def measured(model: Qwen2ForCausalLM, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the best of some rounds of each contender, in turns."""
    best: dict[str, Any] = {}
    ways = contenders(model, rows, options)
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            try:
                found = way(number)
            except (RuntimeError, TypeError, ValueError) as error:
                best[name] = {"not_run": f"{type(error).__name__}: {error}"[:300]}
                continue
            # The first round warms up: kernels are chosen, steps recorded.
            if number and found["tokens_per_s"] > best.get(name, {}).get("tokens_per_s", 0.0):
                best[name] = found
    for name, batch in (("slots", SlotBatch(model, rows, 64)), ("one cache", ActiveBatch(model))):
        if "tokens_per_s" in best.get(name, {}):
            best[name]["launches_per_decoding_step"] = launches(batch, rows, options)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--size", default="0.5B", choices=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--reply", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["slots", "one cache", "generate"])
    parser.add_argument("--minutes", type=float, default=5.0, help="no case begins after so long")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.size, options.rows, options.prompt, options.reply, options.rounds = "tiny", [2, 5], 20, 6, 1
    if options.processor_time:
        torch.set_num_threads(1)
    device = torch_device(options.device)
    model = model_of(options, device)
    begun = time.monotonic()
    results: dict[str, Any] = {}
    for rows in options.rows:
        late = time.monotonic() - begun > 60 * options.minutes
        results[f"{rows} rows"] = {"not_run": "out of time"} if late else measured(model, rows, options)
        print(f"{rows} rows", json.dumps(results[f"{rows} rows"]), flush=True)
        record = {
            "command": "python benchmarks/training/decoding.py",
            "commit": revision(),
            "device": device_name(device) or "a processor",
            "torch": torch.__version__,
            "load_average": round(os.getloadavg()[0], 2),
            "settings": {key: str(value) for key, value in vars(options).items()},
            "results": results,
        }
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
