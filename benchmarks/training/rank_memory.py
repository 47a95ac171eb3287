"""Peak of the host's memory that each of two ranks takes to build its part of a model of about 110 million weights.

    python benchmarks/training/rank_memory.py [--kinds fsdp2] [--output benchmarks/results/rank_memory.json]

`whole in each rank` has every rank build the model before it takes its part, as if all were the first one.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollgym.trainer.backends.fsdp2 import fsdp2_backend
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.local_ranks import LocalRanks
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import Ranks
from rollgym.trainer.backends.zero import zero_backend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.step_metrics import memory_metrics
from rollgym.trainer.models.weights import without_chance

CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Measured:
    """Builds a rank's part, and holds what that took.

    Attributes:
        kind: What divides the model.
        everywhere: Whether each rank builds all of the model first.
    """

    kind: str
    everywhere: bool

    def __call__(self, group: Any, backends: dict[str, Any]) -> "Part":
        torch.set_num_threads(1)
        before = peak_mib()
        head = None
        if group.rank == 0 or self.everywhere:
            head = PolicyHead(without_chance(Qwen3ForCausalLM(Qwen3Config(**CONFIG))), 1.0)
        settings, schedule = OptimizerSettings(shared_prefixes="off"), Schedule(1e-4, 0, 1, "constant")
        if self.kind == "fsdp2":
            part = fsdp2_backend(head, group, settings, schedule)
        else:
            part = zero_backend(head, group, settings, schedule, stage=int(self.kind[-1]))
        return Part(part, peak_mib() - before)


class Part:
    """A rank's part of a model.

    Args:
        backend: The part, held.
        took_mib: What building it took at its peak.
    """

    def __init__(self, backend: Any, took_mib: float) -> None:
        self._backend = backend
        self._took_mib = took_mib

    def took(self) -> float:
        """Return the MiB."""
        return self._took_mib


def peak_mib() -> float:
    # Of this process alone: what getrusage says includes what its parent held when it was started.
    return memory_metrics()["memory/rss_peak_gib"] * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=["fsdp2", "zero3"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    weights = sum(each.numel() for each in Qwen3ForCausalLM(Qwen3Config(**CONFIG)).parameters())
    results: dict[str, Any] = {"weights_mib": round(weights * 4 / 2**20), "load_average": os.getloadavg()[0]}
    for kind in options.kinds:
        for name, everywhere in (("whole in the first rank", False), ("whole in each rank", True)):
            with tempfile.TemporaryDirectory() as folder:
                ranks = Ranks(LocalRanks(Path(folder)), MeshShape(data=2), "cpu", 300.0)
                ranks.start()
                try:
                    ranks.everywhere("build", "policy", Measured(kind, everywhere))
                    took = ranks.everywhere("ask", "policy", "took")
                finally:
                    ranks.close()
            results[f"{kind}, {name}"] = [round(each) for each in took]
            print(kind, name, results[f"{kind}, {name}"], "MiB", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # Recipes are sent to the ranks, which find them by the name of this module.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("benchmarks.training.rank_memory").main()
