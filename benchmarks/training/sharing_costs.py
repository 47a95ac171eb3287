"""Measures the constants of `trainer/backends/packing.py`: what calls cost of which shared prefixes are computed.

    python benchmarks/training/sharing_costs.py [--rounds 5] [--device cuda --dtype bf16]

Forward and backward passes of many shapes, and trees of a prefix with rows behind it, in models of three widths (on an
accelerator: one, of the shape of Qwen2.5-0.5B). The smallest time of the rounds counts; constants are the least
relative squares, none below zero.
"""

import argparse
import time

import numpy as np
import torch
from shared_prefixes import SHAPE, model_of
from transformers import Qwen3Config

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.packing import Kernels, costs_of_calls
from rollgym.trainer.backends.prefix_cache import SharedTokens, hidden_states
from rollgym.trainer.backends.prefix_tree import CallCosts, finest_tree, paths_of

_CALLS = [(1, 64), (1, 512), (4, 256), (16, 24), (16, 128), (64, 24), (64, 64), (8, 512), (2, 1500)]
_TREES = [
    (rows, width, prefix)
    for rows, width in [(2, 16), (8, 24), (8, 200), (32, 24), (32, 100)]
    for prefix in (50, 300, 1000)
]


def calibrate(device: str, dtype: torch.dtype, shapes: list[dict[str, int]], rounds: int) -> None:
    """Fit the constants of calls' costs to measured times."""
    for shape in shapes:
        config = Qwen3Config(**(SHAPE | shape))
        model = model_of(config, dtype).to(device)
        head, features, seconds = PolicyHead(model, 1.0), [], []
        unit = costs_of_calls(head.body, Kernels(1.0, 1.0, 1.0, 1.0, 0.0))
        for rows, width, prefix in [*((*call, 0) for call in _CALLS), *_TREES]:
            features.append(
                [rows * width + prefix, prefix**2, rows * width * (prefix + width), rows * prefix, 2.0]
                if prefix
                else [rows * width, rows * width**2, 0.0, 0.0, 1.0]
            )
            seconds.append(_seconds(head, rows, width, prefix, rounds))
        found = _nonnegative(np.array(features), np.array(seconds))
        predicted = np.array(features) @ found
        ratio = predicted / np.array(seconds)
        relative = found / found[0]
        kernels = {
            "pair": relative[1] / unit.pair,
            "masked_pair": relative[2] / unit.masked_pair,
            "copied": relative[3] / unit.copied,
            "layer, weights included": relative[4] / unit.call,
        }
        print(shape, {name: float(f"{value:.3g}") for name, value in kernels.items()})
        print(
            f"  {found[0] * 1e6:.3g} us a token; predicted / measured {ratio.min():.2f} to {ratio.max():.2f}"
        )


def _seconds(head: PolicyHead, rows: int, width: int, prefix: int, rounds: int) -> float:
    draws = np.random.default_rng(0)
    common = draws.integers(2, 500, prefix)
    # Rows differ in their first token behind the prefix.
    ids = [np.concatenate([common, [2 + row], draws.integers(2, 500, width - 1)]) for row in range(rows)]
    paths = paths_of(ids)
    shared = finest_tree(paths, [len(each) for each in ids], CallCosts(0.0, 0.0, 0.0, 1e9, 0.0))
    device = head.body.device
    wanted = [np.arange(len(each) - 2, len(each)) for each in ids]
    tokens = SharedTokens.of(shared, [ids[row] for row in shared.paths], wanted, device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for _ in range(rounds + 1):
        head.zero_grad(set_to_none=False)
        begun = clock()
        hidden_states(head.body, tokens.calls).sum().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(clock() - begun)
    return min(taken[1:])


def _nonnegative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the coefficients of least relative squares, none below zero."""
    scaled = features / seconds[:, None]
    active = list(range(features.shape[1]))
    while True:
        found = np.zeros(features.shape[1])
        found[active] = np.linalg.lstsq(scaled[:, active], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            return found
        active = [each for each in active if found[each] > 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    shapes = [
        {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 16},
        {},
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "head_dim": 128},
    ]
    if options.device != "cpu":
        shapes = [
            {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "head_dim": 64,
             "num_attention_heads": 14, "num_key_value_heads": 2},
        ]  # fmt: skip
    calibrate(options.device, dtype, shapes, options.rounds)


if __name__ == "__main__":
    main()
