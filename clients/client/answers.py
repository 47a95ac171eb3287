"""Malformed answers of servers: the one way to read answers that may have any form."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from pydantic import ValidationError

from rollgym.clients.protocol.arrays import DecodeError

_T = TypeVar("_T")
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class _Reading:
    """Turns errors from malformed answers into `DecodeError`; not a generator, for speed, since every step uses it."""

    __slots__ = ("_op",)

    def __init__(self, op: str) -> None:
        self._op = op

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, _UNREADABLE):
            raise DecodeError(
                f"the server's answer to {self._op!r} cannot be read: {_reason(error)}"
            ) from error


def reading(op: str) -> _Reading:
    """Read an answer that may have any form while the context is open.

    Args:
        op: The operation, for the message.

    Raises:
        DecodeError: Raised in place of errors that an answer of another form causes.
    """
    return _Reading(op)


def _reason(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) if isinstance(error, DecodeError) else f"{error!r:.200}"


def member(answer: Any, name: str, kind: type[_T]) -> _T:
    """Return a member of an answer, which is of one type; called while an answer is read.

    Raises:
        DecodeError: It is of another type.
    """
    value = answer[name]
    if type(value) is not kind:
        raise DecodeError(f"{name!r} is {type(value).__name__}, not {kind.__name__}")
    return value


def reward_of(answer: Any) -> float:
    """Return the reward of a step.

    Raises:
        DecodeError: The reward is not a number.
    """
    wire = answer["reward"]
    if wire in ("NaN", "Infinity", "-Infinity"):
        # JSON's forms of them. The caller handles a reward that is not finite.
        return float(wire)
    if isinstance(wire, bool) or not isinstance(wire, int | float):
        raise DecodeError(f"the reward of a step is a number, not {type(wire).__name__}")
    return float(wire)


def render_modes(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the render modes that an environment declares; empty if the declaration is not a list."""
    modes = metadata.get("render_modes")
    return modes if isinstance(modes, list) else []
