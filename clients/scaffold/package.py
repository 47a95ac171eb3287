"""An environment package: the names that follow from the one that an author gives, and its files."""

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from token import NAME
from tokenize import generate_tokens

from gymnasium.envs.registration import registry

from rollgym.clients.process.modules import installed_environments
from rollgym.clients.scaffold.folder import rendered, template_texts

KINDS: Mapping[str, str] = {
    "game": "text in, text out: a gymnasium.Env",
    "tools": "tasks that are solved by calling tools: a ToolEnv",
    "verifier": "questions whose answers are checked: a function",
}
"""The kinds of packages, each with its description; each is a folder of `templates/`."""

_COMMON = "common"
_FUNCTIONS = frozenset({"verifier"})
"""Kinds whose environment is a function, named as the package is."""

_LONGEST = 24
"""A longer name makes lines longer than formatters leave them."""

_FOLDERS = frozenset({"src", "tests"})
_NAME = re.compile(r"[A-Za-z][0-9A-Za-z]*(?:[ _-]+[0-9A-Za-z]+)*", re.ASCII)
_VERSION = re.compile(r"-v\d+$", re.ASCII)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[ _-]+")


class NameRefusedError(Exception):
    """No package can have the name; the message says why."""


@dataclass(frozen=True, slots=True)
class PackageNames:
    """The names of an environment package.

    Attributes:
        module: The module to import: `word_ladder`.
    """

    module: str

    @property
    def project(self) -> str:
        """Its name for pip: `word-ladder`."""
        return self.module.replace("_", "-")

    @property
    def camel(self) -> str:
        """The name of its class: `WordLadder`."""
        return "".join(part[:1].upper() + part[1:] for part in self.module.split("_"))

    @property
    def env_id(self) -> str:
        """Its id on servers: `WordLadder-v0`."""
        return f"{self.camel}-v0"


def package_names(name: str) -> PackageNames:
    """Return the names that follow from a name such as `word_ladder`, `word-ladder`, `WordLadder` or `Word Ladder`.

    Raises:
        NameRefusedError: If it is not a name, or another module, package or environment has it.
    """
    bare = _VERSION.sub("", name.strip())
    if not _NAME.fullmatch(bare):
        raise NameRefusedError(
            f"{name[:60]!r} is not a name for a package: it has to begin with one of the letters a to z, and to have "
            "only these, digits, - and _"
        )
    names = PackageNames(_SEPARATORS.sub("_", _HUMP.sub("_", bare)).lower())
    if len(names.module) > _LONGEST:
        raise NameRefusedError(f"{name[:60]!r} is too long: a name has at most {_LONGEST} characters")
    if (reason := _taken(names)) is not None:
        raise NameRefusedError(f"{reason}: give another name")
    return names


def package_files(names: PackageNames, kind: str) -> dict[str, str]:
    """Return the files of a package, by path.

    Args:
        names: The package's.
        kind: One of `KINDS`.

    Raises:
        NameRefusedError: If the template itself needs the name of the package for something else.
    """
    attribute = names.module if kind in _FUNCTIONS else names.camel
    for path, text in template_texts(kind).items():
        if path.endswith(".py") and attribute in _names_in(text):
            raise NameRefusedError(f"{attribute} is a name that the code uses already: give another name")
    marks = {
        "scaffold_name": names.module,
        "scaffold-name": names.project,
        "ScaffoldName": names.camel,
        "ScaffoldObject": attribute,
    }
    return rendered([_COMMON, kind], marks)


def _names_in(source: str) -> set[str]:
    tokens = generate_tokens(StringIO(source).readline)
    return {token.string for token in tokens if token.type == NAME}


def _place_of(module: str) -> str | None:
    spec = find_spec(module)
    if spec is None:
        return None
    # A folder of the working directory alone does not make a module: a conflict with it shows when the package is
    # written.
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return next((each for each in places if each is not None and each != str(Path.cwd() / module)), None)


def _taken(names: PackageNames) -> str | None:
    """Return who has one of the names already."""
    module = names.module
    if keyword.iskeyword(module):
        return f"{module} is a keyword of Python"
    if module in _FOLDERS:
        return f"{module} is a folder of the package"
    if module in sys.stdlib_module_names:
        return f"{module} is a module of Python's standard library"
    try:
        return f"{distribution(names.project).name} is an installed package"
    except PackageNotFoundError:
        pass
    if (place := _place_of(module)) is not None:
        return f"{module} is a module already, at {place}"
    import_module("rollgym")  # registers our environments
    if f"rollgym/{names.env_id}" in registry:
        return f"{names.env_id} is an environment of rollgym"
    if (other := installed_environments().get(names.env_id)) is not None:
        return f"{names.env_id} is an environment of the installed package {other.packages[0]}"
    return None
