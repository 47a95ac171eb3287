"""Imports of packages that are not there, and that the recorded functions never call."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a peer's modules be imported without some packages that they import for other things."""

    def __init__(self, *names: str) -> None:
        """Take the top-level names of those packages."""
        self._names = frozenset(names)

    def install(self) -> None:
        """From here on, imports of these packages give empty ones."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return how to import a name that is one of them."""
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _AbsentModule(types.ModuleType):
    """A module all of whose attributes are there, and do nothing."""

    __path__: ClassVar[list[str]] = []
    __version__ = "1.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NothingType(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()


class _NothingType(type):
    """A class of which parts may be deleted that it never had."""

    def __delattr__(cls, name: str) -> None:
        """There is nothing to delete."""


class _Nothing:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Take anything."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        # As a decorator it leaves what it decorates.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()
