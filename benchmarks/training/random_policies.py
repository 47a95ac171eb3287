"""Random policies in bfloat16, faults of one layer, and the command line of scripts that judge many of them."""

import argparse
import asyncio
import copy
import json
import random
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
from rollgym.trainer.models.weights import place, without_chance

VOCABULARY, MAX_LENGTH = 400, 128
FORMER_TOLERANCE = 0.25
"""Of the largest difference of any token; what the sign test is compared with."""
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
_NOTED_EVERY = 20


def start_of(seed):
    """A random policy (family, depth, width, size of weights), a prompt and a temperature."""
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
def with_layer_fault(model, seed, size, kind="noise"):
    """A copy with the matrices of one layer changed by `size` of their own: by noise, or by that factor."""
    faulty = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    body = faulty.base_model
    layers = getattr(body, "layers", None) or body.h
    layer = layers[int(torch.randint(len(layers), (), generator=generator))]
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            wide = parameter.float()
            noise = torch.randn(wide.shape, generator=generator) * wide.square().mean().sqrt()
            parameter.copy_(wide + size * (noise if kind == "noise" else wide))
    return faulty


def judged(script, description, starts, measured):
    """Run a script's command line: judge many starts, and write what was found so far after every twenty.

    Args:
        script: Its name.
        description: What it says of itself.
        starts: How many there are if nothing else is asked for.
        measured: An asynchronous iterator over what was found after each start, given the seed of the first, how many
            there are, and how many of them have faults planted.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first start.")
    parser.add_argument("--starts", type=int, default=starts)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--out", type=Path, help="Write the numbers here, after every twenty starts.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = f"--first {options.first} --starts {options.starts} --faults {options.faults}"
    command = f"python benchmarks/training/{script} {of}"
    at = {"command": command, "revision": revision(), "torch": torch.__version__}
    asyncio.run(_noted(measured(options.first, options.starts, options.faults), at, options))


async def _noted(found, at, options):
    began, number = time.process_time(), 0
    async for numbers in found:
        number += 1
        if number % _NOTED_EVERY and number != options.starts:
            continue
        report = {**at, "starts": number, **numbers(), "cpu_seconds": round(time.process_time() - began, 1)}
        text = json.dumps(report, indent=1)
        if options.out is not None:
            options.out.write_text(text + "\n")
        if number == options.starts:
            print(text)
