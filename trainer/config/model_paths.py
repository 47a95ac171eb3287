"""Reads `model.path`: a folder, a GGUF file, a package that contains one, or a model of the hub."""

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rollgym.extras import install_line
from rollgym.trainer.core.errors import ConfigError

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
