"""The target of the checks: a class of the author, or a registered environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gymnasium
import orjson
from gymnasium.envs.registration import registry

from rollgym.clients.process.modules import current_path, installed_environments
from rollgym.suggestions import did_you_mean
from rollgym.user_code import misnamed, missing_attribute, missing_module

_SERVED_NAME = "checked"


class TargetError(Exception):
    """The name does not lead to an environment."""


@dataclass(frozen=True)
class CheckTarget:
    """An environment under check.

    Attributes:
        name: The author's name for it: `module:Class`, an id of Gymnasium's registry, or that of another package.
        kwargs: The kwargs that it is made with.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A console command does not search the working directory, which usually holds the author's code.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        object.__setattr__(self, "name", current_path(self.name))

    def build(self) -> gymnasium.Env[Any, Any]:
        """Make the environment here.

        Raises:
            TargetError: The name does not lead to an environment.
        """
        if self._class_path:
            built = self._load_class()(**self.kwargs)
            if not isinstance(built, gymnasium.Env):
                raise TargetError(f"{self.name} makes a {type(built).__name__}, which is no gymnasium.Env")
            return built
        return gymnasium.make(self._registered_id(), disable_env_checker=True, **self.kwargs)

    def server_arguments(self) -> list[str]:
        """Return the server arguments that serve it as `served_id`, with the kwargs that only an operator sets."""
        names = self._operator_names()
        mine = {name: value for name, value in self.kwargs.items() if name in names}
        kwargs = ["--operator-kwargs", f"{self.served_id}={orjson.dumps(mine).decode()}"] if mine else []
        if self._class_path:
            return ["--env", f"{_SERVED_NAME}={self._class_path}", *kwargs]
        if self._registered_id() != self.name:
            return kwargs  # one of ours, which every server offers
        return ["--gymnasium", f"{_SERVED_NAME}={self.name}", *kwargs]

    @property
    def variables(self) -> dict[str, str]:
        """The additional environment variables for other processes that make it: the path of its module.

        A test's process may look in places that others do not, such as `src` by pytest's `pythonpath`.
        """
        if not self._class_path:
            return {}
        self._load_class()
        module = sys.modules[self._class_path.partition(":")[0].partition(".")[0]]
        if module.__file__ is None:
            return {}
        place = Path(module.__file__).absolute().parents[1 if hasattr(module, "__path__") else 0]
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))}

    @property
    def client_kwargs(self) -> dict[str, Any]:
        """The kwargs that a client sends: all except those that only an operator sets."""
        names = self._operator_names()
        return {name: value for name, value in self.kwargs.items() if name not in names}

    @property
    def served_id(self) -> str:
        """Its id on the server."""
        is_ours = not self._class_path and self._registered_id() != self.name
        return self.name if is_ours else _SERVED_NAME

    def _operator_names(self) -> frozenset[str]:
        # A class says it without being made, which kwargs that it does not take would prevent.
        if self._class_path and isinstance(found := self._load_class(), type):
            return frozenset(getattr(found, "operator_kwargs", ()))
        built = self.build()
        built.close()
        return frozenset(getattr(type(built.unwrapped), "operator_kwargs", ()))

    @property
    def _class_path(self) -> str:
        """The path of the class, as `module:Class`; empty for an id of Gymnasium's registry.

        Raises:
            TargetError: The name is the address of a server.
        """
        if self.name.startswith(("http://", "https://")):
            raise TargetError(f"this is for a class; for a server: roll-env probe ENV_ID {self.name}")
        if ":" in self.name or self._known_id() is not None:
            return self.name if ":" in self.name else ""
        found = installed_environments().get(self.name)
        return "" if found is None else found.path

    def _load_class(self) -> Any:
        if wrong := misnamed(self._class_path):
            raise TargetError(wrong)
        module_name, _, class_name = self._class_path.partition(":")
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            raise TargetError(f"cannot import {module_name}: {missing_module(error, module_name)}") from error
        if not hasattr(module, class_name):
            raise TargetError(missing_attribute(module, class_name))
        return getattr(module, class_name)

    def _registered_id(self) -> str:
        """Return the id in Gymnasium's registry; ours stand under our namespace there."""
        if (known := self._known_id()) is None:
            names = {name.removeprefix("rollgym/") for name in registry} | installed_environments().keys()
            raise TargetError(f"there is no environment {self.name!r}; {self._likely_meant(names)}")
        return known

    def _likely_meant(self, names: Iterable[str]) -> str:
        """Return what to write: the id that is near, or the class of a module that was named without it."""
        hint = did_you_mean(self.name, names)
        module = self.name.removeprefix("./").removesuffix(".py")
        if module.isidentifier() and PathFinder.find_spec(module) is not None:
            return f"a class is named `{module}:Class`" + (f"; {hint}" if hint else "")
        return hint or "a class is named `module:Class`"

    def _known_id(self) -> str | None:
        import_module("rollgym")  # registers ours
        return next((each for each in (f"rollgym/{self.name}", self.name) if each in registry), None)
