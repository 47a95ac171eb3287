"""Numbers from outside, checked at the boundary: a user's code, an environment, an inference engine.

A sign test says how many of some differences may be on the wrong side before chance no longer explains it.
"""

import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from rollgym.trainer.core.errors import InvalidNumberError

if TYPE_CHECKING:
    from torch import Tensor


LARGEST = 1e9
"""Magnitude beyond which a number is refused: sums and squares of it must stay far within float32."""
MOST_IDS = 2**31
"""More ids than any vocabulary has; arrays of them hold no larger ones."""
_LONGEST_SHOWN = 4096
"""Bits of an integer that is written out in a message."""

NO_DEVIATION = 1e-6
"""A deviation up to this is rounding noise of equal scores."""


def finite_number(value: object, name: str) -> float:
    """Return `value` as a float.

    Args:
        value: A number of Python's, numpy's or torch's. A boolean or a text is refused.
        name: Its name, for the message.

    Raises:
        InvalidNumberError: If it is not a number, not finite, or larger than `LARGEST`.
    """
    if type(value) is float and -LARGEST <= value <= LARGEST:
        return value  # This is the way of nearly all numbers.
    try:
        plain = _plain(value)
        if isinstance(plain, bool | str | bytes) or not hasattr(plain, "__float__"):
            raise InvalidNumberError(f"{name} is {_shown(value)}, which is no number")
        number = float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidNumberError(f"{name} is {_shown(value)}: {error}") from error
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise InvalidNumberError(f"{name} is {number:g}; numbers are finite and at most {LARGEST:g}")
    return number


def integers_within(values: Sequence[Any], span: range, name: str, remedy: str = "") -> list[int]:
    """Return integers of Python's, numpy's or torch's as integers of Python's.

    Args:
        values: The integers. A boolean is refused.
        span: The allowed range.
        name: The name of such an integer, for the message.
        remedy: What to do if a value is not allowed.

    Raises:
        InvalidNumberError: If one is a boolean, or outside the range.
        TypeError: If one is not an integer.
    """
    plain = [value if type(value) is int else _plain(value) for value in values]
    for value in plain:
        if isinstance(value, bool) or operator.index(value) not in span:
            raise InvalidNumberError(
                f"{name} is {_shown(value)}, and no integer from {span.start} to {span.stop - 1}{remedy}"
            )
    return plain


def not_finite(state: Any, name: str = "") -> Iterator[str]:
    """Yield the names of all tensors in nested dictionaries and lists that hold anything but finite numbers."""
    if _is_tensor(state):
        if state.is_floating_point() and not bool(state.isfinite().all()):
            yield name
    elif isinstance(state, float):
        if not math.isfinite(state):
            yield name
    elif isinstance(state, Mapping | list | tuple):
        parts = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, part in parts:
            yield from not_finite(part, f"{name}.{key}" if name else str(key))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic | np.ndarray) or _is_tensor(value) else value


def _is_tensor(value: object) -> "TypeGuard[Tensor]":
    # Episodes can be played without torch: unless it was imported, no value is a tensor.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _LONGEST_SHOWN:
        return f"an integer of {value.bit_length()} bits"  # Python writes none of more than 4300 digits
    text = repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:40]}..."


CHANCE = 1e-7
"""How often a sign test may refuse what is right."""


def least_by_no_chance(count: int, chance: float = CHANCE) -> int:
    """Return how many of some tokens are further away by no chance; more than there are if that cannot be said.

    If each is further away with a probability of at most a half, as many or more are with one of at most `chance`.

    Args:
        count: Number of tokens, 1,000 at most.
        chance: How often the test may refuse what is right.
    """
    tail = 0.0
    for further in range(count, -1, -1):
        tail += comb(count, further) / 2.0**count
        if tail > chance:
            return further + 1
    return 0
