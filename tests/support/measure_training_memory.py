"""Trains two steps of about 100 million random weights on the processor, and prints what memory that took.

Run as a program of its own: `python tests/support/measure_training_memory.py '{"checkpointing": false}'`.
"""

import json
import resource
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.backends.base import MicroBatch, TrainRow
from trainer.backends.heads import PolicyHead
from trainer.backends.torch_backend import Schedule, TorchBackend
from trainer.config.run import OptimizerSettings

ROWS, TOKENS = 8, 256
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


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    return -micro.outputs.sum() / (ROWS * TOKENS), {}


def main() -> None:
    checkpointing = json.loads(sys.argv[1])["checkpointing"]
    torch.set_num_threads(1)
    warm = torch.ones(64, 64, requires_grad=True)  # what libraries load at their first use is not the model's
    torch.optim.AdamW([warm]).step()
    (warm @ warm).sum().backward()
    before = peak_bytes()
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    backend = TorchBackend(
        PolicyHead(model, 1.0),
        OptimizerSettings(tokens_per_micro_batch=ROWS * TOKENS),
        Schedule(1e-4, 0, 2, "constant"),
        gradient_checkpointing=checkpointing,
    )
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[0] = False
    for _ in range(2):
        rows = [TrainRow(torch.randint(0, CONFIG["vocab_size"], (TOKENS,)), mask) for _ in range(ROWS)]
        backend.step(rows, loss, entropy="metric")
    config = model.config.to_dict()
    print(
        json.dumps(
            {
                "config": {name: config[name] for name in ("model_type", *CONFIG)},
                "micro_batch_tokens": ROWS * TOKENS,
                "peak_bytes": peak_bytes() - before,
            }
        )
    )


if __name__ == "__main__":
    main()
