"""Modules and packages as they are installed: paths `module:attribute`, commands that run a module, and versions.

Settings may have paths from before all packages were parts of `rollgym`.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollgym.extensions import Extension, extensions
from rollgym.version import __version__

_FLOORS = ("clients", "env_server", "envs", "sandbox", "trainer")
_FORMER = re.compile(rf"((?:[\w.-]+=)?)((?:{'|'.join(_FLOORS)})(?:\.\w+)*)(:[\w.-]+)")
_PACKAGE = Path(__file__).absolute().parents[2]
"""The folder `rollgym` that this module is imported from."""


class FormerNameWarning(FutureWarning):
    """A setting, an option or a path was given by the name that it had before.

    A `FutureWarning`: the person who wrote it is to see it, and not only developers.
    """


def current_path(path: str) -> str:
    """Return the present path of a module of this package, and warn if the old path was written.

    `envs.games.frozen_lake:FrozenLakeEnv` becomes `rollgym.envs.games.frozen_lake:FrozenLakeEnv`. A module of the user
    takes precedence: if Python finds another package `envs`, the path is returned unchanged.

    Args:
        path: `module:attribute`, or `name=module:attribute`; any other text is returned unchanged.
    """
    match = _FORMER.fullmatch(path)
    if match is None or _is_of_the_user(match[2]) or not _is_module(_PACKAGE.joinpath(*match[2].split("."))):
        return path
    current = f"{match[1]}rollgym.{match[2]}{match[3]}"
    # Named from this line, so that Python shows it once for each path.
    warnings.warn(f"{path} is called {current} now", FormerNameWarning, stacklevel=1)
    return current


def with_current_paths(values: Any) -> Any:
    """Return plain data, in which old paths of this package's modules are replaced by present ones."""
    match values:
        case str():
            return current_path(values)
        case dict():
            return {key: with_current_paths(value) for key, value in values.items()}
        case list():
            return [with_current_paths(value) for value in values]
        case _:
            return values


def _is_of_the_user(module: str) -> bool:
    """Whether Python finds a module under this name that is not ours; of a regular package, its first part decides."""
    floor, *inside = module.split(".")
    spec = find_spec(floor)
    if spec is None:
        return False
    places = spec.submodule_search_locations or []
    if [Path(place).resolve() for place in places] == [(_PACKAGE / floor).resolve()]:
        # The working directory is a checkout of this package, with the floors' folders at the top.
        return False
    if spec.origin is not None:
        return True
    # A folder without an `__init__.py` is a package, too, even one that holds only data: look for the module itself.
    return any(_is_module(Path(place).joinpath(*inside)) for place in places)


def _is_module(place: Path) -> bool:
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


_HOME = Path(__file__).absolute().parents[3]
"""The folder that `rollgym` lies in."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package.

    `python -m` alone would search the working directory first for every import, and a `rollgym.py`, a `random.py` or a
    folder `numpy` of the user would shadow the module that the process needs.

    Args:
        module: Its name.
        arguments: Its arguments.
    """
    # With a source tree that is not installed, only the working directory may lead to `rollgym`.
    path = [] if Path.cwd() == _HOME else ["-P"]
    return [sys.executable, *path, "-m", module, *arguments]


GROUP = "rollgym.environments"
"""Entry points `Id-v0 = "module:Class"` of environments in other packages."""


def installed_environments() -> dict[str, Extension]:
    """Return the environments that other packages bring, by id; nothing of them is imported."""
    return extensions(GROUP)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let a command say which version it is of."""
    parser.add_argument(
        "--version", action="version", version=f"rollgym {__version__}", help="Print the version and exit."
    )
