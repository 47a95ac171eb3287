"""Reading actions from the wire."""

from collections.abc import Callable
from typing import Any

from gymnasium import Space, spaces

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.values import DecodeError, decode_value, encode_value

ActionReader = Callable[[Any], tuple[Any, Any]]
"""Turns what a client sent into (the action, its form in JSON's encoding), or raises `invalid_action`.

The second form is what journals keep and what repeated steps are compared by, whatever encoding they came in.
"""


def action_reader(space: Space[Any]) -> ActionReader:
    """The reader of one action space. Text and integers, the hot path, have readers of their own."""
    if isinstance(space, UnicodeText | spaces.Text):
        return _read_text
    if type(space) is spaces.Discrete:
        return _discrete_reader(space)
    return _general_reader(space)


def _read_text(wire: Any) -> tuple[Any, Any]:
    # A text is never refused: what it means is the environment's business.
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
    def read(wire: Any) -> tuple[Any, Any]:
        try:
            action = decode_value(space, wire)
        except DecodeError as error:
            raise ProblemError(
                "invalid_action", f"the action does not fit the action space: {error}"
            ) from error
        if not space.contains(action):
            raise ProblemError("invalid_action", "the action is not in the action space")
        return as_sampled(space, action), encode_value(space, action, binary=False)

    return read


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
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(as_sampled(space.feature_space, item) for item in action)
    return action
