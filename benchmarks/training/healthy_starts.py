"""How often the look before a run refuses a healthy policy in bfloat16, and how many faults of one layer it finds.

    python benchmarks/training/healthy_starts.py [--first 0] [--starts 1000] [--faults 100] \
        [--out benchmarks/results/healthy_starts.json]

Each start is a random policy of its own (family, depth, width, size of weights, temperature, prompt), with the embedded
engine beside it. A fault changes the weights of one layer of the engine's copy by 1e-2 of their size: all matrices by
noise of that size, or all by that factor. For comparison, the same starts are judged by the largest difference of any
token, as 0.25 would have it.
"""

import argparse
import asyncio
import copy
import json
import random
import statistics
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.assembly.probe import probe_log_probabilities
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.torch_engine import TorchEngine
from rollgym.trainer.models.chance import without_chance
from rollgym.trainer.models.weights import place

VOCABULARY = 400
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES = {
    "gemma2": (Gemma2Config, {"query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gpt2": (GPT2Config, {}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeConfig, _EXPERTS),
}
FAULTS = ("noise", "factor")
SIZE = 1e-2


def start_of(seed):
    """A random policy in bfloat16, a prompt and a temperature."""
    draw = random.Random(seed)
    family = draw.choice(sorted(FAMILIES))
    kind, more = FAMILIES[family]
    width = draw.choice([32, 64])
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": draw.randint(1, 3), "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": width // 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = without_chance(AutoModelForCausalLM.from_config(kind(**sizes, **more), dtype=torch.float32))
    scale = draw.choice([1.0, 3.0, 6.0, 12.0])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    place(model, torch.bfloat16, torch.device("cpu"))
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(4, 48))]
    return family, model, prompt, draw.choice([0.7, 1.0, 1.3])


@torch.no_grad()
def with_fault(model, kind, seed):
    """A copy with the matrices of one layer changed."""
    faulty = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    body = faulty.base_model
    layers = getattr(body, "layers", None) or body.h
    layer = layers[int(torch.randint(len(layers), (), generator=generator))]
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            wide = parameter.float()
            noise = torch.randn(wide.shape, generator=generator) * wide.square().mean().sqrt()
            parameter.copy_(wide + SIZE * (noise if kind == "noise" else wide))
    return faulty


async def looked(model, engine_model, prompt, temperature):
    """Return whether a start is refused, and the largest difference where it is not."""
    async with TorchEngine(engine_model, max_rows=2, max_length=128, shares_weights=True) as engine:
        try:
            return False, await probe_log_probabilities(model, engine, prompt, temperature, 128)
        except ConfigError:
            return True, None


def summary(healthy, largest, found, faults):
    """Numbers of the starts so far."""
    return {
        "starts": sum(each["starts"] for each in healthy.values()),
        "refused": sum(each["refused"] for each in healthy.values()),
        "refused_by_largest": sum(each["refused_by_largest"] for each in healthy.values()),
        "largest_difference": {"median": statistics.median(largest), "largest": max(largest)},
        "faults": {kind: {"planted": faults, "found": count} for kind, count in found.items()},
        "by_family": healthy,
    }


async def measured(first, starts, faults, note):
    healthy, largest, found = {}, [], dict.fromkeys(FAULTS, 0)
    for number in range(starts):
        seed = first + number
        family, model, prompt, temperature = start_of(seed)
        refused, apart = await looked(model, model, prompt, temperature)
        counts = healthy.setdefault(family, {"starts": 0, "refused": 0, "refused_by_largest": 0})
        counts["starts"] += 1
        counts["refused"] += refused
        if apart is not None:
            largest.append(apart)
            counts["refused_by_largest"] += apart > 0.25
        if number < faults:
            for kind in FAULTS:
                found[kind] += (await looked(model, with_fault(model, kind, seed), prompt, temperature))[0]
        if (number + 1) % 20 == 0 or number + 1 == starts:
            note(summary(healthy, largest, found, min(faults, number + 1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="Seed of the first start.")
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--out", type=Path, help="Write the numbers here, after every twenty starts.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    of = f"--first {options.first} --starts {options.starts} --faults {options.faults}"
    command = f"python benchmarks/training/healthy_starts.py {of}"
    at = {"command": command, "revision": revision(), "torch": torch.__version__}

    def note(numbers):
        report = {**at, **numbers, "cpu_seconds": round(time.process_time() - began, 1)}
        text = json.dumps(report, indent=1)
        if options.out is not None:
            options.out.write_text(text + "\n")
        if numbers["starts"] == options.starts:
            print(text)

    asyncio.run(measured(options.first, options.starts, options.faults, note))


if __name__ == "__main__":
    main()
