"""Operations on sessions, so that many can go in one frame, and what resets and steps lead to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rollgym.clients.client.session import EnvSession


class ResetResult(NamedTuple):
    """How an episode begins: what `Env.reset` returns."""

    observation: Any
    info: dict[str, Any]


class StepResult(NamedTuple):
    """What an action led to: what `Env.step` returns."""

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
