"""Models and tokenizers in Hugging Face layout: on disk, or fetched from the hub once."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trainer.core.errors import ConfigError

_HUB_TIMEOUT_S = 8.0
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def model_folder(path: str, *, fetch: bool = True) -> Path:
    """Return the folder of a model: itself, or the copy of the hub's model of that name in the local cache.

    Args:
        path: A folder, or a name on the hub such as `Qwen/Qwen2.5-0.5B-Instruct`.
        fetch: Whether to fetch what the cache does not have; if not, the hub is only asked whether it has it.

    Raises:
        ConfigError: If it is neither here nor to be had; the message says what to do.
    """
    if Path(path).is_dir():
        return Path(path)
    with suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(path, allow_patterns=list(_FILES), local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return cached
    elsewhere = (
        "name a folder that holds it, or fetch it where there is a network "
        f"(hf download {path}) and set HF_HOME to that cache and HF_HUB_OFFLINE=1"
    )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"model.path: there is no folder {path} and no model {path} in the cache {constants.HF_HUB_CACHE}, and "
            f"HF_HUB_OFFLINE forbids to fetch it: {elsewhere}"
        )
    try:
        HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
        return Path(snapshot_download(path, allow_patterns=list(_FILES))) if fetch else Path(path)
    except GatedRepoError as error:
        raise ConfigError(
            f"model.path: {path} is given only to those who have accepted its terms: do so on its page, then set "
            "HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model.path: there is no folder {path} here, and the Hugging Face hub has no model of that name, or "
            "none that it shows without HF_TOKEN"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"model.path: there is no folder {path} here, and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}): {elsewhere}"
        ) from error


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
