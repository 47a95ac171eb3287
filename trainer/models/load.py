"""Models and tokenizers on disk, in Hugging Face layout."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trainer.errors import ConfigError


def load_model(directory: Path) -> PreTrainedModel:
    """Load a causal language model in float32.

    Raises:
        ConfigError: If there is no model in `directory`.
    """
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory} holds no model: it has no config.json")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer that lies beside a model."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def save_model(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    """Write a model (safetensors) and its tokenizer; any tool that reads Hugging Face layout can load them."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
