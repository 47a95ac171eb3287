"""Trains two steps of 35 million random weights on the processor, and prints what memory that took.

With gradient checkpointing and without. A program of its own: `python tests/support/measure_training_memory.py`.
"""

import gc
import json

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollgym.trainer.backends.base import MicroBatch, TrainRow
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.step_metrics import memory_metrics

ROWS, TOKENS, MICRO_BATCHES = 4, 128, 2
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def peak_bytes() -> int:
    return round(memory_metrics()["memory/rss_peak_gib"] * 2**30)


def loss(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    return -micro.outputs.sum() / (ROWS * TOKENS), {}


def row(tokens: int) -> TrainRow:
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[0] = False
    return TrainRow(torch.randint(0, CONFIG["vocab_size"], (tokens,)), mask)


def train(*, checkpointing: bool) -> None:
    model = Qwen3ForCausalLM(
        Qwen3Config(**{name: value for name, value in CONFIG.items() if name != "model_type"})
    )
    backend = TorchBackend(
        PolicyHead(model, 1.0),
        OptimizerSettings(tokens_per_micro_batch=ROWS * TOKENS, shared_prefixes="off"),
        Schedule(1e-4, 0, 2, "constant"),
        gradient_checkpointing=checkpointing,
    )
    backend.step([row(2)], loss, entropy="metric")  # from here on the optimizer has its numbers
    backend.step([row(TOKENS) for _ in range(ROWS * MICRO_BATCHES)], loss, entropy="metric")


def main() -> None:
    torch.set_num_threads(1)
    warm = torch.ones(64, 64, requires_grad=True)  # what libraries load at their first use is not the model's
    torch.optim.AdamW([warm]).step()
    (warm @ warm).sum().backward()
    before = peak_bytes()
    peaks = {}
    # The smaller peak first: a process's peak never falls.
    for name, checkpointing in (("checkpointing", True), ("plain", False)):
        train(checkpointing=checkpointing)
        peaks[name] = peak_bytes() - before
        gc.collect()
    print(json.dumps({"config": CONFIG, "micro_batch_tokens": ROWS * TOKENS, "peaks": peaks}))


if __name__ == "__main__":
    main()
