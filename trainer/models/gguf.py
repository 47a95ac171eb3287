"""GGUF files as models: read once, dequantized, and kept in Hugging Face layout, which everything else takes.

A run trains weights, saves them, and sends them to inference servers and other ranks. All of that uses a folder
in Hugging Face layout, so a GGUF file becomes one: in `$XDG_CACHE_HOME/rollgym/gguf`, one for each state of a file.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from rollgym.trainer.core.errors import ConfigError

_FORM = 1
"""Raised when the same file becomes another folder than before."""

_UNREADABLE = (
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
)
"""Errors of the libraries for a damaged file, or an unknown model."""

_EXACT_TYPES = frozenset({"F32", "F16"})
"""Types of numbers that bfloat16 would round."""

_LLAMA_3_PIECES = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_EACH_DIGIT = ("smollm", "starcoder", "refact", "command-r")
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")


def kept_model(file: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder of a GGUF file's model in Hugging Face layout; it is written if that was never done.

    Args:
        file: The GGUF file.
        write: Writes the model into a folder that is there and empty.

    Raises:
        ConfigError: If the cache is not writable; the message names it.
    """
    with _reading(file):
        folder = kept_folder(file)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another process may have been faster
                _write_whole(folder, write)
    except OSError as error:
        raise ConfigError(
            f"model.path: {file} cannot be kept in Hugging Face layout in {folder.parent} ({error.strerror or error}): "
            "set XDG_CACHE_HOME to a directory that can be written and has room"
        ) from error
    return folder


def kept_folder(file: Path) -> Path:
    """Return the cache folder for the present content of a GGUF file; a changed file gets another folder."""
    state = file.stat()
    name = f"{_FORM}\0{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollgym" / "gguf" / f"{file.stem[:80]}-{digest}"


def read_gguf(file: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model of a GGUF file with dequantized weights, and its tokenizer with the file's chat template.

    Weights are float32 if the file has float32 or float16, and otherwise bfloat16: a quantized weight is less exact
    than that.

    Raises:
        ConfigError: If transformers cannot read the file.
    """
    with _without_bars(), _reading(file):
        dtype, pieces = _facts(file)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, local_files_only=True, **_dequantized()
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    # The weights are plain numbers now, regardless of the file's format.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    splitter = _splitter(pieces)
    if splitter is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = splitter
    return model, tokenizer


def gguf_config(file: Path) -> Mapping[str, Any]:
    """Return the config.json of a GGUF file's model; its weights are not read.

    Raises:
        ConfigError: If transformers cannot read the file.
    """
    with _without_bars(), _reading(file):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    return dict(config.to_dict())


def _dequantized() -> dict[str, Any]:
    """Return what has transformers unpack all weights: its newer releases can compute with packed ones."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _facts(file: Path) -> tuple[torch.dtype, str]:
    """Return the type of number that holds a file's weights, and how its tokenizer cuts texts, as the file calls it."""
    from gguf import GGUFReader  # of the extra `gguf`

    reader = GGUFReader(file)
    matrices = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    field = reader.fields.get("tokenizer.ggml.pre")
    dtype = torch.float32 if matrices & _EXACT_TYPES else torch.bfloat16
    return dtype, "" if field is None else str(field.contents())


def _splitter(pieces: str) -> PreTokenizer | None:
    """Return what cuts texts before pairs of bytes are merged, if transformers would use GPT-2's rule instead."""
    if pieces in _EACH_DIGIT:
        return pre_tokenizers.Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    if pieces in _LLAMA_3:
        split = Split(Regex(_LLAMA_3_PIECES), behavior="isolated")
        return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    for left in folder.parent.glob(
        f"{folder.name}-*"
    ):  # left by a killed process: a live writer holds the lock
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)  # a server may be another user's
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path: {file} holds no model that can be read ({type(error).__name__}: {reason})"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
