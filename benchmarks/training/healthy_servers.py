"""How often servers with the right weights in bfloat16 are refused after an update, and which faults are found.

    python benchmarks/training/healthy_servers.py [--first 0] [--starts 300] [--faults 100] \
        [--out benchmarks/results/healthy_servers.json]

Each start is a random policy as in healthy_starts.py. A training backend in bfloat16 has it, and three servers that
compute otherwise: one as the embedded engine does, one with transformers' eager attention, and one with arithmetic in
float32 on the rounded weights. For comparison, the same servers are judged by the largest difference of 16 tokens, as
0.25 would have it. Faults are planted in a copy that computes in bfloat16.
"""

import copy
import statistics

import torch
from random_policies import FORMER_TOLERANCE, MAX_LENGTH, VOCABULARY, judged, start_of, with_layer_fault

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.errors import WrongWeightsError
from rollgym.trainer.learn.weights.verification import Tolerance, WeightCheck, probe_prompts, tolerance_for

SIGN_TEST, LARGEST = tolerance_for("bfloat16", None), Tolerance(FORMER_TOLERANCE)
LAYER_NOISE = "layer_noise_"
FAULTS = (
    *(f"{LAYER_NOISE}{size}" for size in ("0.01", "0.1", "0.3", "1")),
    *("embedding_of_another", "head_rolled"),
)


@torch.no_grad()
def with_fault(model, kind, seed):
    """A copy with a fault."""
    if kind.startswith(LAYER_NOISE):
        return with_layer_fault(model, seed, float(kind.removeprefix(LAYER_NOISE)))
    faulty = copy.deepcopy(model)
    if kind == "embedding_of_another":
        generator = torch.Generator().manual_seed(seed)
        embedding = faulty.get_input_embeddings().weight
        embedding.copy_(embedding[torch.randperm(len(embedding), generator=generator)])
    else:
        head = faulty.get_output_embeddings().weight
        head.copy_(head.roll(1, 0).clone())
    return faulty


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


def backend_of(model, temperature):
    schedule = Schedule(1e-3, 0, 1, "constant")
    return TorchBackend(PolicyHead(model, temperature), OptimizerSettings(), schedule, dtype=torch.bfloat16)


def summary(healthy, largest, found):
    """Numbers of the starts so far."""
    return {
        "healthy": healthy,
        "largest_difference": {"median": statistics.median(largest), "largest": max(largest)},
        "faults": found,
    }


async def measured(first, starts, faults):
    healthy, largest = {}, []
    found = {kind: {"planted": 0, "found": 0, "found_by_largest": 0} for kind in FAULTS}
    for number in range(starts):
        seed = first + number
        _, model, prompt, temperature = start_of(seed)
        backend = backend_of(model, temperature)
        for kind, served in servers_of(model).items():
            counts = healthy.setdefault(kind, {"checks": 0, "refused": 0, "refused_by_largest": 0})
            no, apart = await refused(backend, served, prompt, temperature, SIGN_TEST)
            counts["checks"] += 1
            counts["refused"] += no
            counts["refused_by_largest"] += (await refused(backend, served, prompt, temperature, LARGEST))[0]
            largest.append(apart)
        for kind in FAULTS if number < faults else ():
            faulty, counts = with_fault(model, kind, seed), found[kind]
            counts["planted"] += 1
            for rule, name in ((SIGN_TEST, "found"), (LARGEST, "found_by_largest")):
                counts[name] += (await refused(backend, faulty, prompt, temperature, rule))[0]
        yield lambda: summary(healthy, largest, found)


if __name__ == "__main__":
    judged("healthy_servers.py", __doc__.splitlines()[0], 300, measured)
