"""Hooks that an author overrides, whose old names work for one release, and the options that a reset takes."""

import inspect
import warnings
from collections.abc import Collection, Mapping, Set
from functools import cache
from typing import Any

OLD_NAMES_UNTIL = "0.2"
"""The release in which the underscored names of hooks are removed."""

# The frames between a class statement and the warning: this module's function, and `__init_subclass__` of the base.
_CLASS_STATEMENT = 3


def bridge_old_names(cls: type, renamed: Mapping[str, str]) -> None:
    """Let a class that overrides a hook by its old name work, and let `super()` find hooks by both names.

    Called from `__init_subclass__` of a base class, and once for the base class itself.

    Args:
        cls: A class that was just made.
        renamed: The new name of each hook, by its old one.
    """
    overridden = {}
    for old, new in renamed.items():
        owner = next((each for each in cls.__mro__ if old in each.__dict__ or new in each.__dict__), None)
        if owner is None:
            continue
        if new not in owner.__dict__:
            overridden[old] = new
            setattr(cls, new, owner.__dict__[old])
        elif old not in owner.__dict__:
            setattr(cls, old, owner.__dict__[new])
    if overridden:
        warnings.warn(
            f"{cls.__qualname__} overrides {', '.join(overridden)}: rename to {', '.join(overridden.values())}; "
            f"the old names work until release {OLD_NAMES_UNTIL}",
            DeprecationWarning,
            stacklevel=_CLASS_STATEMENT,
        )


def overrides(cls: type, hooks: Set[str], home: str) -> bool:
    """Return whether a class overrides one of some hooks, whose defaults are in the module `home`."""
    owners = (each for each in cls.__mro__ if hooks & each.__dict__.keys())
    return next(owners).__module__ != home


def require_hooks(cls: type) -> None:
    """Refuse a class with abstract methods, which `gymnasium.Env` does not do by itself.

    Raises:
        TypeError: If there are any; the message names them.
    """
    if missing := _missing_hooks(cls):
        raise TypeError(f"{cls.__name__} must define {', '.join(missing)}")


@cache
def _missing_hooks(cls: type) -> tuple[str, ...]:
    methods = (inspect.getattr_static(cls, name, None) for name in dir(cls))
    # By the methods' own names, so that one that is there by its old name, too, is listed once.
    return tuple(
        dict.fromkeys(each.__name__ for each in methods if getattr(each, "__isabstractmethod__", False))
    )


def complete_metadata(cls: type, *, expert: bool) -> None:
    """Fill in what the metadata of a class leave out from its parent's, and say whether it has an expert.

    Args:
        cls: A class that was just made.
        expert: Whether it overrides the hook of the expert.
    """
    parents = (each.__dict__["metadata"] for each in cls.__mro__[1:] if "metadata" in each.__dict__)
    own = cls.__dict__.get("metadata", {})
    cls.metadata = {**next(parents), **own, "expert": expert}  # type: ignore[attr-defined]


_FLAGS = ("expert", "labels")


def misfit(known: Collection[str], options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the options of a reset, if anything is."""
    for name in options:
        if name not in known:
            return f"there is no option {name[:100]!r}; the options are {', '.join(sorted(known))}"
    for flag in _FLAGS:
        if type(options.get(flag, False)) is not bool:
            return f"the option {flag!r} is true or false"
    return None


def checked_options(known: Collection[str], options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the options of a reset; empty if there are none.

    Raises:
        ValueError: One is not among those that are known.
    """
    options = options or {}
    if (wrong := misfit(known, options)) is not None:
        raise ValueError(wrong)
    return options
