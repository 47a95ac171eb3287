"""Models and tokenizers in Hugging Face layout: on disk, or fetched from the hub once."""

import copy
from collections.abc import Iterable
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
    StrictDataclassError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from rollgym.trainer.config.model import check_model_path, gguf_file
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.gguf import kept_model, read_gguf
from rollgym.trainer.models.shards import SHARD_BYTES, ShardWriter
from rollgym.trainer.models.weights import hub_tensors, without_chance

_HUB_TIMEOUT_S = 8.0
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_UNREADABLE = (
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors of the libraries for a model's files that are missing, damaged, or of an unknown model."""


def model_folder(path: str, key: str = "model.path", *, fetch: bool = True) -> Path:
    """Return the folder of a model: itself, or the local copy of a GGUF file's model, or of the hub's of that name.

    Args:
        path: A folder, a GGUF file (`gguf_file`), or a name on the hub such as `Qwen/Qwen2.5-0.5B-Instruct`.
        key: The setting or the option that names it.
        fetch: Whether to fetch what the cache does not have; if not, the hub is only asked whether it has it.

    Raises:
        ConfigError: If it is neither here nor to be had; the message says what to do.
    """
    if (packed := gguf_file(path, key)) is not None:
        check_model_path(path, key)
        return kept_model(packed, lambda folder: save_model(*read_gguf(packed), folder))
    if Path(path).is_dir():
        return Path(path)
    check_model_path(path, key)
    with suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(path, allow_patterns=list(_FILES), local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return cached
    elsewhere = (
        f"name its folder, or set HF_HUB_OFFLINE=1 and HF_HOME to a cache that `hf download {path}` filled"
    )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{key}: there is no folder {path} and no model {path} in the cache {constants.HF_HUB_CACHE}, and "
            f"HF_HUB_OFFLINE forbids to fetch it: {elsewhere}"
        )
    try:
        HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
        return Path(snapshot_download(path, allow_patterns=list(_FILES))) if fetch else Path(path)
    except GatedRepoError as error:
        raise ConfigError(
            f"{key}: {path} is given only to those who have accepted its terms: do so on its page, then set "
            "HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{key}: there is no folder {path} here, and the Hugging Face hub has no model of that name, or "
            "none that it shows without HF_TOKEN"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"{key}: there is no folder {path} here, and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}): {elsewhere}"
        ) from error


def load_model(
    directory: Path, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """Load a causal language model, or one that also sees, on the CPU.

    Args:
        directory: The model's folder, in Hugging Face layout.
        dtype: Type of its numbers.
        attention: Implementation of attention by the library's name; its choice if None.

    Raises:
        ConfigError: If `directory` has no model that can be loaded, or the attention is not available.
    """
    config = load_config(directory)
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    kind = next((each for each in kinds if type(config) in each._model_mapping), AutoModelForCausalLM)
    try:
        loaded: Any = kind.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except _UNREADABLE as error:
        if attention is not None and isinstance(error, ImportError | ValueError):
            raise ConfigError(f"model.attention {attention}: {error}") from error
        raise _no_model(directory, error) from error
    model, read = loaded
    # A model that scores has no head for words, and learns on without one. All else would be drawn at random.
    missing = sorted(name for name in read["missing_keys"] if not name.startswith("lm_head."))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{directory} holds no whole model: its files lack {missing[0]}{others}")
    return without_chance(model)


def load_config(directory: Path) -> PretrainedConfig:
    """Load a model's configuration.

    Raises:
        ConfigError: If `directory` has no model, or its family is unknown.
    """
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory} holds no model: it has no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except _UNREADABLE as error:
        raise _no_model(directory, error) from error
    return config


def _no_model(directory: Path, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:500]
    return ConfigError(f"{directory} holds no model that can be loaded ({type(error).__name__}: {reason})")


def set_attention(models: Iterable[PreTrainedModel], attention: str | None) -> None:
    """Set the attention implementation of models.

    Args:
        models: The models.
        attention: Implementation by the library's name; None leaves them as they are.

    Raises:
        ConfigError: If that attention cannot be had.
    """
    if attention is None:
        return
    for model in models:
        try:
            model.set_attn_implementation(attention)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"model.attention {attention}: {error}") from error


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer that lies beside a model.

    Raises:
        ConfigError: If there is none, or it cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        files = getattr(tokenizer, "vocab_files_names", {}).values()
        # Of some families the library makes up one that knows no words.
        if files and not any((directory / file).exists() for file in files):
            raise OSError(f"there is no {' and no '.join(files)}")
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory} holds no tokenizer that can be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): put its files beside the model (tokenizer.json, tokenizer_config.json)"
        ) from error
    return tokenizer


def save_model(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    """Write a model (safetensors) and its tokenizer; any tool that reads Hugging Face layout can load them."""
    save_weights(model, directory)
    tokenizer.save_pretrained(directory)


def save_weights(model: PreTrainedModel, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model without its tokenizer, tensor by tensor: at most one file's tensors are held in addition.

    Args:
        model: The model; adapters are added to the weights.
        directory: The target; created if missing, and cleared of another model's weights.
        shard_bytes: Size from which on another file is begun.
    """
    write_model(model, hub_tensors(model), model.dtype, directory, shard_bytes)


def write_model(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights that are given one after the other, with a model's configuration.

    Args:
        model: Whose configuration is written.
        tensors: The weights, by the names that they have on the hub.
        dtype: Type of their numbers.
        directory: The target; created if missing, and cleared of another model's weights.
        shard_bytes: Size from which on another file is begun.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in [*directory.glob("model*.safetensors"), directory / "model.safetensors.index.json"]:
        old.unlink(missing_ok=True)
    shards = ShardWriter(directory, shard_bytes)
    for name, tensor in tensors:
        shards.add(name, tensor)
    shards.close()
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that the model's generation_config (and its config) name as ends: one, or a list of them.

    Instruct models often end their turns with another token than their tokenizer's end of text, and some with several.
    """
    configs = (getattr(model, "generation_config", None), model.config)
    return frozenset(each for config in configs for each in _listed(getattr(config, "eos_token_id", None)))


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many token ids a model knows.

    That is the height of its embedding. Tokenizers may have fewer tokens, and some have more.
    """
    return int(model.config.get_text_config().vocab_size)


def _listed(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
