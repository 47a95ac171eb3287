"""Operations on sessions, many of which can go in one frame, and the results of resets and steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rollgym.clients.protocol.messages import MAX_SEED

if TYPE_CHECKING:
    from rollgym.clients.client.session import EnvSession


def wire_seed(seed: int) -> int:
    """Return a seed as the wire carries it.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is negative, or not below 2**53.
    """
    number = seed if isinstance(seed, bool) else operator.index(seed)
    if isinstance(number, bool):
        raise TypeError("a seed is a whole number, not a boolean")
    if not 0 <= number < MAX_SEED:
        shown = number if abs(number) < 2**64 else f"a number of {number.bit_length()} bits"
        raise ValueError(
            f"seed: {shown} is not from 0 to 2**53 - 1, the largest integer that every JSON reader takes"
        )
    return number


class ResetResult(NamedTuple):
    """The start of an episode: the return value of `Env.reset`."""

    observation: Any
    info: dict[str, Any]


class StepResult(NamedTuple):
    """The result of an action: the return value of `Env.step`."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Operation(NamedTuple):
    """An operation on a session that is not sent yet, so that many can go in one frame.

    Attributes:
        session: The session.
        fields: The frame.
        take: Turns the server's answer (and whether it is plain data) into the result, and notes it in the record.
    """

    session: EnvSession
    fields: dict[str, Any]
    take: Callable[[dict[str, Any], bool], Any]
