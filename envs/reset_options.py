"""What a reset may be told: an environment names its options in `reset_options`, and refuses all others."""

from collections.abc import Collection, Mapping
from typing import Any

EXPERT = frozenset({"expert"})
"""The option of all that have an expert, and of those that say that they have none."""


def misfit(known: Collection[str], options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the options of a reset, if anything is."""
    for name in options:
        if name not in known:
            return f"there is no option {name[:100]!r}; the options are {', '.join(sorted(known))}"
    if type(options.get("expert", False)) is not bool:
        return "the option 'expert' is true or false"
    return None


def checked_options(known: Collection[str], options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the options of a reset; none where there are none.

    Raises:
        ValueError: One is not among those that are known.
    """
    options = options or {}
    if (wrong := misfit(known, options)) is not None:
        raise ValueError(wrong)
    return options
