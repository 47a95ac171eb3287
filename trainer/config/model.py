"""The policy: which model, on which device, in which number format, and which weights are trained.

`model.path` is a folder, a GGUF file, a package that contains one, or a model of the hub.
"""

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rollgym.extras import install_line
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.strict import Amount, Settings, UserPath


class LoraSettings(Settings):
    """Low-rank adapters beside the model's own weights, which stay as they are (Hu et al. 2021, arXiv 2106.09685).

    Dropout is not offered: the sampled and the trained distribution must be the same.
    """

    rank: int = Field(16, ge=1, le=65_536, description="Rank of each adapter.")
    alpha: PositiveFloat = Field(32.0, description="Adapters are scaled by alpha / rank.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="Names of the layers that get adapters, such as [q_proj, v_proj], or a regular expression; "
        "all-linear: every linear layer but the output embedding.",
    )

    @field_validator("target_modules")
    @classmethod
    def _targets_are_named(cls, value: str | list[str]) -> str | list[str]:
        if not value or not all(value):
            raise ValueError("name at least one layer, or all-linear")
        return value


class VisionSettings(Settings):
    """The tiny policy's vision tower: as in LLaVA, a CLIP tower whose patches become tokens."""

    image_size: int = Field(
        32,
        ge=4,
        le=1024,
        description="Pixels along a side of what it sees; pictures of other sizes are scaled to it.",
    )
    patch_size: int = Field(
        8, ge=1, le=256, description="Pixels along a side of a patch, which is one token."
    )
    layers: int = Field(1, ge=1, le=128, description="Depth of the tower; its width is the policy's.")

    @model_validator(mode="after")
    def _patches_are_whole(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}"
            )
        return self


class ModelSettings(Settings):
    """The policy: its model, device, number format and trained weights."""

    path: UserPath | None = Field(
        None,
        min_length=1,
        description="Directory in Hugging Face layout; or the name of a model on the Hugging Face hub, such as "
        "Qwen/Qwen2.5-0.5B-Instruct, which is fetched once; or a GGUF file, a directory that holds one, or "
        "package:NAME for the one that an installed package brings, which is dequantized once (extra [gguf]); absent: "
        "build the tiny policy.",
    )
    hidden_size: int = Field(64, ge=1, le=65_536, description="Tiny policy: width.")
    layers: int = Field(2, ge=1, le=1024, description="Tiny policy: depth.")
    heads: int = Field(4, ge=1, le=1024, description="Tiny policy: attention heads.")
    vision: VisionSettings | None = Field(
        None,
        description="Tiny policy: have it see pictures; absent: it reads text only. A model of `path` sees if it can.",
    )
    max_length: Amount = Field(1024, description="Longest row in tokens, prompt and replies together.")
    device: str = Field(
        "auto",
        pattern=r"^[a-z][a-z0-9_]*(:[0-9]{1,4})?$",
        description="Where models are computed: auto (the accelerator that torch finds, else cpu), cpu, or a type of "
        "device of torch's, with an index if there are several.",
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Numbers that models are computed and sampled in. With bf16 the optimizer keeps weights in fp32: "
        "those are trained and saved in checkpoints.",
    )
    attention: str | None = Field(
        None,
        min_length=1,
        description="Implementation of attention, as transformers calls it: sdpa, eager, flash_attention_2; absent: "
        "the library's choice. With flash attention no rows share what they begin with.",
    )
    compile: str | None = Field(
        "auto",
        min_length=1,
        description="torch, fsdp2: compile the layers for training steps, by this backend of torch.compile's, such as "
        "inductor. auto: by inductor on accelerators that it has a compiler for (Triton); null: not at all.",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch",
        description="Whose kernels norms, gates and rotary embeddings are computed by: torch's, or Liger's, on an "
        "accelerator in one process; needs the extra [liger].",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute activations once more for the gradient in place of keeping them: less memory, about a "
        "third more work.",
    )
    lora: LoraSettings | None = Field(
        None, description="Train adapters in place of the model's weights; needs the extra [lora]."
    )

    @model_validator(mode="after")
    def _shape_is_one(self) -> Self:
        shape = {name: getattr(self, name) for name in ("hidden_size", "layers", "heads", "vision")}
        if self.path is not None:
            odd = [name for name, value in shape.items() if value != type(self).model_fields[name].default]
            if odd:
                raise ValueError(
                    f"{', '.join(odd)} shape the tiny policy, and path names another model: leave out one of them"
                )
        elif self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of twice heads {self.heads}")
        return self


PACKAGE = "package:"
"""Prefix of the name of an installed Python package that contains a model as a GGUF file."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
"""Pattern of a model's name on the Hugging Face hub."""

_SUFFIX = ".gguf"
_PART = re.compile(r".*-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)
_MOST_NAMED = 5


def check_model_path(path: str, key: str = "model.path") -> None:
    """Refuse a path that is not a folder with a model, a GGUF file, or the form of a name on the Hugging Face hub.

    Args:
        path: The path that the user set.
        key: The setting that names it.

    Raises:
        ConfigError: If it is none of them, or a GGUF file without an installed reader.
    """
    file = gguf_file(path, key)
    if file is not None:
        _check_readable(file, key)
    elif os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            raise ConfigError(f"{key}: {path} holds no model: it has no config.json, and no GGUF file")
    elif os.path.exists(path):
        raise ConfigError(f"{key}: {path} is a file and no GGUF file: name the model's folder")
    elif not HUB_NAME.fullmatch(path):
        raise ConfigError(f"{key}: there is no folder {path}, and no model of the hub is called so")


def gguf_file(path: str, key: str = "model.path") -> Path | None:
    """Return the GGUF file that a path means; None if it means a folder in Hugging Face layout, or a name on the hub.

    Args:
        path: The file, a folder that holds one and no model beside it, or `package:NAME` or `package:NAME/FILE`.
        key: The setting that names it.

    Raises:
        ConfigError: If the file or package is not found, or there is more than one file.
    """
    if path.startswith(PACKAGE):
        return _in_package(path, key)
    if os.path.isdir(path):
        has_config = os.path.exists(os.path.join(path, "config.json"))
        return None if has_config else _only_one(Path(path), path, key)
    if not path.lower().endswith(_SUFFIX):
        return None
    if not os.path.isfile(path):
        raise ConfigError(
            f"{key}: there is no file {path}; paths are taken from the directory of the command"
        )
    return Path(path)


def _in_package(path: str, key: str) -> Path:
    """Find the file of a package without importing it: its code may need dependencies that are not installed."""
    package, _, inner = path.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier():
        raise ConfigError(f"{key}: {path} names no package: write {PACKAGE}NAME, or {PACKAGE}NAME/FILE.gguf")
    try:
        spec = find_spec(package)
    except ValueError:  # a module without a file, such as __main__
        spec = None
    if spec is None:
        raise ConfigError(
            f"{key}: there is no package {package} here: pip install --no-deps {package.replace('_', '-')}"
        )
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    if inner:
        found = next((folder / inner for folder in folders if os.path.isfile(folder / inner)), None)
        if found is not None and inner.lower().endswith(_SUFFIX):
            return found
        raise ConfigError(f"{key}: the package {package} has no GGUF file {inner}; {_named(_files(folders))}")
    for folder in folders:
        if (file := _only_one(folder, path, key)) is not None:
            return file
    raise ConfigError(f"{key}: the package {package} brings no GGUF file")


def _only_one(folder: Path, path: str, key: str) -> Path | None:
    files = _files([folder])
    if len(files) > 1 and not all(_PART.fullmatch(each.name) for each in files):
        raise ConfigError(f"{key}: {path} holds several GGUF files: name one of them; {_named(files)}")
    return files[0] if files else None


def _files(folders: Iterable[Path]) -> list[Path]:
    try:
        return sorted(
            each for folder in folders for each in folder.iterdir() if each.name.lower().endswith(_SUFFIX)
        )
    except OSError as error:
        raise ConfigError(f"cannot look for a GGUF file in {error.filename}: {error.strerror}") from error


def _named(files: list[Path]) -> str:
    if not files:
        return "it has none"
    more = ", ..." if len(files) > _MOST_NAMED else ""
    return f"it has {', '.join(each.name for each in files[:_MOST_NAMED])}{more}"


def _check_readable(file: Path, key: str) -> None:
    if _PART.fullmatch(file.name):
        raise ConfigError(
            f"{key}: {file.name} is one part of a model: join the parts first, with "
            f"`llama-gguf-split --merge {file.name} WHOLE.gguf`"
        )
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{key}: {file.name} is a GGUF file, which needs the package {package}: {install_line('gguf')}"
            )
