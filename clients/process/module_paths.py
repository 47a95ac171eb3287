"""Paths `module:attribute` in settings, from before all packages were parts of `rollgym`."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FLOORS = ("clients", "env_server", "envs", "sandbox", "trainer")
_FORMER = re.compile(rf"((?:[\w.-]+=)?)((?:{'|'.join(_FLOORS)})(?:\.\w+)*)(:[\w.-]+)")
_PACKAGE = Path(__file__).absolute().parents[2]
"""The folder `rollgym` that this module is imported from."""


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
    # FutureWarning: the person who wrote the settings is to see it, and not only developers. Named from this line,
    # so that Python shows it once for each path.
    warnings.warn(f"{path} is called {current} now", FutureWarning, stacklevel=1)
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
