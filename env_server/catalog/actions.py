"""Reading actions from the wire."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.values import DecodeError, decode_value, encode_value, stacked_rows

ActionReader = Callable[[Any], tuple[Any, Any]]
"""Decodes a client's action into (the action, its form in JSON's encoding), or raises `invalid_action`.

Journals keep the second form, and repeated steps are compared by it, so that both encodings are equal.
"""


_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
_SIMPLE = (spaces.Box, spaces.MultiDiscrete, spaces.Discrete, spaces.Text)
# Items of sequences, by the cost of checking one: 1,024 of any kind, or 32,768 numbers, texts or plain arrays, take
# tens of milliseconds.
_CHEAP, _DEAR, _MOST = 1, 32, 32_768


def action_reader(space: Space[Any]) -> ActionReader:
    """The reader of one action space. Text and integers, the hot path, have readers of their own."""
    if isinstance(space, UnicodeText | spaces.Text):
        return _read_text
    if type(space) is spaces.Discrete:
        return _discrete_reader(space)
    return _general_reader(space)


def _read_text(wire: Any) -> tuple[Any, Any]:
    # A text is never refused: its meaning is up to the environment.
    if type(wire) is not str:
        raise ProblemError("invalid_action", f"the action must be text, not {type(wire).__name__}")
    return wire, wire


def _discrete_reader(space: spaces.Discrete[Any]) -> ActionReader:
    start, stop, scalar = int(space.start), int(space.start) + int(space.n), space.dtype.type

    def read(wire: Any) -> tuple[Any, Any]:
        if type(wire) is not int or not start <= wire < stop:
            raise ProblemError("invalid_action", f"the action must be an integer from {start} to {stop - 1}")
        return scalar(wire), wire

    return read


def _general_reader(space: Space[Any]) -> ActionReader:
    holds_sequences = _holds_sequences(space)

    def read(wire: Any) -> tuple[Any, Any]:
        if holds_sequences:
            _count_items(space, wire, 0)
        try:
            action = decode_value(space, wire)
        except DecodeError as error:
            raise ProblemError(
                "invalid_action", f"the action does not fit the action space: {error}"
            ) from error
        try:
            fits = _contains(space, action) if holds_sequences else space.contains(action)
        except OverflowError:
            # An integer that no array can hold: NumPy 1 does not compare it.
            fits = False
        if not fits:
            raise ProblemError("invalid_action", "the action is not in the action space")
        return as_sampled(space, action), encode_value(space, action, binary=False)

    return read


def _holds_sequences(space: Space[Any]) -> bool:
    return isinstance(space, spaces.Sequence) or any(map(_holds_sequences, _parts(space)))


def _parts(space: Space[Any]) -> Iterable[Space[Any]]:
    if isinstance(space, spaces.Dict):
        return space.spaces.values()
    return space.spaces if isinstance(space, spaces.Tuple | spaces.OneOf) else ()


def _count_items(space: Space[Any], wire: Any, cost: int) -> int:
    """Count the cost of checking the items of sequences; the decoder reports values that do not fit.

    Raises:
        ProblemError: `invalid_action`: they cost more than others may be kept waiting for.
    """
    if isinstance(space, spaces.Sequence):
        return _count_sequence(space.feature_space, wire, cost)
    if isinstance(space, spaces.Dict) and type(wire) is dict:
        for key, part in space.spaces.items():
            cost = _count_items(part, wire.get(key), cost)
    elif isinstance(space, spaces.Tuple) and type(wire) is list:
        for part, item in zip(space.spaces, wire, strict=False):
            cost = _count_items(part, item, cost)
    elif isinstance(space, spaces.OneOf) and type(wire) is list and len(wire) == 2:
        chosen = wire[0]
        if type(chosen) is int and 0 <= chosen < len(space.spaces):
            cost = _count_items(space.spaces[chosen], wire[1], cost)
    return cost


def _count_sequence(feature: Space[Any], wire: Any, cost: int) -> int:
    if type(wire) is not list:
        return cost
    each = _CHEAP if isinstance(feature, _SIMPLE) and dict not in set(map(type, wire)) else _DEAR
    cost += each * len(wire)
    if cost > _MOST:
        raise ProblemError(
            "invalid_action",
            f"its sequences have too many items: at most {_MOST // each} of this kind are taken",
        )
    if each == _DEAR:
        for item in wire:
            cost = _count_items(feature, item, cost)
    return cost


def _contains(space: Space[Any], action: Any) -> bool:
    """The result of `space.contains` for a decoded action, without checking numbers one by one."""
    if isinstance(space, spaces.Dict):
        return all(_contains(part, action[key]) for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(_contains(part, item) for part, item in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.OneOf):
        return _contains(space.spaces[action[0]], action[1])
    if isinstance(space, spaces.Sequence) and not space.stack:
        return _contains_all(space.feature_space, action)
    if isinstance(space, spaces.Sequence) and isinstance(
        space.feature_space, spaces.Box | spaces.MultiDiscrete
    ):
        return _within(space.feature_space, action)
    return bool(space.contains(action))


def _contains_all(feature: Space[Any], items: tuple[Any, ...]) -> bool:
    rows = stacked_rows(feature, items)
    if rows is not None:
        return _within(feature, rows)
    if type(feature) is spaces.Discrete and items:
        return bool(feature.contains(min(items)) and feature.contains(max(items)))
    return all(_contains(feature, item) for item in items)


def _within(feature: Space[Any], rows: Any) -> bool:
    """Whether all rows of an array are values of a space."""
    if isinstance(feature, spaces.Box):
        return bool(np.all(rows >= feature.low) and np.all(rows <= feature.high))
    assert isinstance(feature, spaces.MultiDiscrete)
    return bool(np.all(rows >= feature.start) and np.all(rows - feature.start < feature.nvec))


def as_sampled(space: Space[Any], action: Any) -> Any:
    """Return an action with the types that `space.sample()` has: integers of `Discrete` spaces have their dtype.

    Environments compute with them: NumPy promotes `float32` by `np.int64` and not by `int`.
    """
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(action)
    if isinstance(space, spaces.Dict):
        return {key: as_sampled(part, action[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_sampled(part, item) for part, item in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.OneOf):
        return action[0], as_sampled(space.spaces[action[0]], action[1])
    if (
        isinstance(space, spaces.Sequence)
        and not space.stack
        and not isinstance(space.feature_space, _ARRAYS)
    ):
        return tuple(as_sampled(space.feature_space, item) for item in action)
    return action
