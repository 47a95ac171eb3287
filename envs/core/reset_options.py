"""Options of a reset: an environment names its options in `reset_options`, and refuses all others."""

from collections.abc import Collection, Mapping
from typing import Any

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
