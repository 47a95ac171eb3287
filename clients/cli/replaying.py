"""Replaying a portable episode on a server: the same steps again, each compared by its digest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import ValidationError

from clients.client.client import EnvClient
from clients.client.session import EnvSession
from clients.protocol.arrays import DecodeError
from clients.protocol.episode import PortableEpisode, step_digest
from clients.protocol.errors import ProblemError
from clients.protocol.values import decode_value, encode_value

_SHOWN_ELEMENTS = 16
"""An array with more elements than this is told by its shape and range."""

_DECIMALS = 4


class EpisodeError(Exception):
    """A text is not a portable episode that can be replayed; the message says why."""


class ReplayFailed(Exception):  # noqa: N818 - the name says what happened
    """The server or the environment refused what it once did.

    Args:
        step: The step that was refused; None for the begin of the episode.
        reason: What was answered.
    """

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(f"{place(step)}: {reason}")
        self.step = step
        self.reason = reason


class ReplayedStep(NamedTuple):
    """What a step returned this time, and whether it is what it returned when the episode was recorded.

    Attributes:
        step: Index of the step; None for the reset.
        action: The action, in JSON's encoding; None for the reset.
        observation: What was observed this time.
        reward: The reward; 0 for the reset.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
        digest: The digest of what was returned this time.
        recorded: The digest in the episode.
    """

    step: int | None
    action: Any
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    digest: str
    recorded: str

    @property
    def same(self) -> bool:
        """Whether the digests are equal."""
        return self.digest == self.recorded


def place(step: int | None) -> str:
    """Say where in an episode something is."""
    return "the reset" if step is None else f"step {step}"


def read_episode(text: str | bytes) -> PortableEpisode:
    """Read a portable episode that has begun.

    Raises:
        EpisodeError: It is none, or was never reset.
    """
    try:
        episode = PortableEpisode.model_validate(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise EpisodeError(f"it is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise EpisodeError(
            f"it is not a portable episode: {field and field + ': '}{first['msg']}"
            " (`roll-env play --save` and GET /v1/sessions/ID/episode give one)"
        ) from error
    if episode.seed is None:
        raise EpisodeError("its session was never reset, so there is nothing to replay")
    return episode


def first_steps(episode: PortableEpisode, count: int) -> PortableEpisode:
    """Return the episode as it was after its first steps."""
    return episode.model_copy(
        update={
            "actions": episode.actions[:count],
            "digests": episode.digests[:count],
            "reseeds": [each for each in episode.reseeds if each[0] <= count],
        }
    )


async def replay(client: EnvClient, episode: PortableEpisode) -> AsyncIterator[ReplayedStep]:
    """Play an episode again: make, reset with its seed and options, and take its actions.

    It goes on past a digest that differs; who iterates decides.

    Args:
        client: A client of the server that plays it.
        episode: One that has begun.

    Raises:
        ReplayFailed: The server or the environment refused a step.
        ConnectionError: The server cannot be reached.
        TimeoutError: The server does not answer.
    """
    session = await client.make(episode.env_id, decode_value(None, episode.kwargs))
    step: int | None = None
    try:
        observation, _ = await session.reset(episode.seed, decode_value(None, episode.options))
        yield _compare(session, None, None, (observation, 0.0, False, False), episode.reset_digest or "")
        reseeded = {steps for steps, _ in episode.reseeds}
        for step, (action, recorded) in enumerate(zip(episode.actions, episode.digests, strict=True)):
            if step in reseeded:
                # No call seeds a session anew in the middle; restoring the episode up to here does, and compares.
                await session.close()
                session = await client.restore(first_steps(episode, step))
            observation, reward, terminated, truncated, _ = await session.step(
                decode_value(session.action_space, action)
            )
            yield _compare(session, step, action, (observation, reward, terminated, truncated), recorded)
    except ProblemError as problem:
        raise ReplayFailed(step, str(problem)) from problem
    except DecodeError as error:
        raise ReplayFailed(step, f"the recorded action does not fit the action space: {error}") from error


def _compare(
    session: EnvSession,
    step: int | None,
    action: Any,
    outcome: tuple[Any, float, bool, bool],
    recorded: str,
) -> ReplayedStep:
    seen = encode_value(session.observation_space, outcome[0], binary=False)
    return ReplayedStep(step, action, *outcome, step_digest(seen, *outcome[1:]), recorded)


def shorten(value: Any) -> str:
    """Write an observation or action for a terminal: text as it is, large arrays by shape and range."""
    if isinstance(value, str):
        return value
    return orjson.dumps(_summary(value)).decode()


def _summary(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _summary(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _array_summary(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_summary(part) for part in value]
    return encode_value(None, value, binary=False)


def _array_summary(array: np.ndarray[Any, Any]) -> Any:
    if array.size <= _SHOWN_ELEMENTS:
        exact = array.astype(np.float64).round(_DECIMALS) if array.dtype.kind == "f" else array
        return encode_value(None, exact.tolist(), binary=False)
    return f"{array.dtype.name}{list(array.shape)} from {array.min():g} to {array.max():g}"
