"""How often servers with the right weights in bfloat16 are refused after an update, and which faults are found.

    python benchmarks/training/healthy_servers.py [--first 0] [--starts 300] [--faults 100] \
        [--out benchmarks/results/healthy_servers.json]

Each start is a random policy as in healthy_starts.py. A training backend in bfloat16 has it, and three servers that
compute otherwise: one as the embedded engine does, one with transformers' eager attention, and one with arithmetic in
float32 on the rounded weights. For comparison, the same servers are judged by the largest difference of 16 tokens, as
0.25 would have it. Faults are planted in a copy that computes in bfloat16.
"""

import argparse
import asyncio
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from healthy_starts import VOCABULARY, start_of

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.errors import WrongWeightsError
from rollgym.trainer.inference.torch_engine import TorchEngine
from rollgym.trainer.learn.weights.verification import Tolerance, WeightCheck, probe_prompts, tolerance_for

MAX_LENGTH = 128


@torch.no_grad()
def _layer(model, draw):
    body = model.base_model
    layers = getattr(body, "layers", None) or body.h
    return layers[draw % len(layers)]


def _noise(parameter, size, generator):
    noise = torch.randn(parameter.shape, generator=generator)
    return size * noise * parameter.float().square().mean().sqrt()


@torch.no_grad()
def with_fault(model, kind, seed):
    """A copy with a fault."""
    faulty = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    if kind == "embedding_of_another":
        embedding = faulty.get_input_embeddings().weight
        embedding.copy_(embedding[torch.randperm(len(embedding), generator=generator)])
    elif kind == "head_rolled":
        head = faulty.get_output_embeddings().weight
        head.copy_(head.roll(1, 0).clone())
    else:
        size = float(kind.removeprefix("layer_noise_"))
        for parameter in _layer(faulty, seed).parameters():
            if parameter.dim() > 1:
                parameter.add_(_noise(parameter, size, generator).to(parameter.dtype))
    return faulty


FAULTS = (
    *("layer_noise_0.01", "layer_noise_0.1", "layer_noise_0.3", "layer_noise_1"),
    *("embedding_of_another", "head_rolled"),
)


def servers_of(model):
    """Healthy servers that compute in other ways."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    return {"as_engine": model, "eager_attention": eager, "float32_arithmetic": copy.deepcopy(model).float()}


async def refused(backend, served, prompt, temperature, tolerance):
    """Return whether a server is refused, and its largest difference where it is not."""
    prompts = probe_prompts(prompt, VOCABULARY, MAX_LENGTH, tolerance)
    check = WeightCheck(prompts, temperature, tolerance, seed=0, max_length=MAX_LENGTH)
    check.begin(1, backend)
    async with TorchEngine(served, max_rows=8, max_length=MAX_LENGTH, shares_weights=True) as engine:
        try:
            return False, await check("server", engine)
        except WrongWeightsError:
            return True, check.largest


async def measured(first, starts, faults, note):
    tolerance, former = tolerance_for("bfloat16", None), Tolerance(0.25)
    healthy, largest = {}, []
    found = {kind: {"planted": 0, "found": 0, "found_by_largest": 0} for kind in FAULTS}
    for number in range(starts):
        seed = first + number
        _, model, prompt, temperature = start_of(seed)
        schedule = Schedule(1e-3, 0, 1, "constant")
        backend = TorchBackend(
            PolicyHead(model, temperature), OptimizerSettings(), schedule, dtype=torch.bfloat16
        )
        for kind, served in servers_of(model).items():
            counts = healthy.setdefault(kind, {"checks": 0, "refused": 0, "refused_by_largest": 0})
            no, apart = await refused(backend, served, prompt, temperature, tolerance)
            counts["checks"] += 1
            counts["refused"] += no
            counts["refused_by_largest"] += (await refused(backend, served, prompt, temperature, former))[0]
            largest.append(apart)
        if number < faults:
            for kind in FAULTS:
                faulty = with_fault(model, kind, seed)
                counts = found[kind]
                counts["planted"] += 1
                for rule, name in ((tolerance, "found"), (former, "found_by_largest")):
                    counts[name] += (await refused(backend, faulty, prompt, temperature, rule))[0]
        if (number + 1) % 20 == 0 or number + 1 == starts:
            note(
                {
                    "starts": number + 1,
                    "healthy": healthy,
                    "largest_difference": {"median": statistics.median(largest), "largest": max(largest)},
                    "faults": found,
                }
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="Seed of the first start.")
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--out", type=Path, help="Write the numbers here, after every twenty starts.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    of = f"--first {options.first} --starts {options.starts} --faults {options.faults}"
    at = {
        "command": f"python benchmarks/training/healthy_servers.py {of}",
        "revision": revision(),
        "torch": torch.__version__,
    }

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
