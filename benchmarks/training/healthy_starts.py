"""How often the look before a run refuses a healthy policy in bfloat16, and how many faults of one layer it finds.

    python benchmarks/training/healthy_starts.py [--first 0] [--starts 1000] [--faults 100] \
        [--out benchmarks/results/healthy_starts.json]

Each start is a random policy of its own (family, depth, width, size of weights, temperature, prompt), with the embedded
engine beside it. A fault changes the weights of one layer of the engine's copy by 1e-2 of their size: all matrices by
noise of that size, or all by that factor. For comparison, the same starts are judged by the largest difference of any
token, as 0.25 would have it.
"""

import statistics

from random_policies import FORMER_TOLERANCE, MAX_LENGTH, judged, start_of, with_layer_fault

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.run.probe import probe_log_probabilities

FAULTS = ("noise", "factor")
SIZE = 1e-2


async def looked(model, engine_model, prompt, temperature):
    """Return whether a start is refused, and the largest difference where it is not."""
    async with TorchEngine(engine_model, max_rows=2, max_length=MAX_LENGTH, shares_weights=True) as engine:
        try:
            return False, await probe_log_probabilities(model, engine, prompt, temperature, MAX_LENGTH)
        except ConfigError:
            return True, None


def summary(healthy, largest, found, faults):
    """Numbers of the starts so far."""
    return {
        "refused": sum(each["refused"] for each in healthy.values()),
        "refused_by_largest": sum(each["refused_by_largest"] for each in healthy.values()),
        "largest_difference": {"median": statistics.median(largest), "largest": max(largest)},
        "faults": {kind: {"planted": faults, "found": count} for kind, count in found.items()},
        "by_family": healthy,
    }


async def measured(first, starts, faults):
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
            counts["refused_by_largest"] += apart > FORMER_TOLERANCE
        if number < faults:
            for kind in FAULTS:
                faulty = with_layer_fault(model, seed, SIZE, kind)
                found[kind] += (await looked(model, faulty, prompt, temperature))[0]
        planted = min(faults, number + 1)
        yield lambda planted=planted: summary(healthy, largest, found, planted)


if __name__ == "__main__":
    judged("healthy_starts.py", __doc__.splitlines()[0], 1000, measured)
