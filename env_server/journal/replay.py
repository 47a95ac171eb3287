"""Rebuilding an environment by replay, with proof that it is the same episode."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gymnasium import Space

from rollgym.clients.protocol.episode import step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import EncodeError, decode_value, encode_value
from rollgym.env_server.catalog.actions import action_reader
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.journal.journal import Journal
from rollgym.env_server.workers.base import EnvironmentRaised, EnvSource, StepOutcome, Worker


class ReplayDiverged(Exception):  # noqa: N818 - the name says what happened
    """The environment's replay differs from the journal."""


class RebuiltPoint(NamedTuple):
    """The point that a replay has brought an environment to.

    Attributes:
        action_space: The environment's action space.
        observation_space: Its observation space.
        first: The return value of the reset; None if there was no reset.
        last: The return value of the last step; None if no step was taken.
    """

    action_space: Space[Any]
    observation_space: Space[Any]
    first: tuple[Any, Mapping[str, Any]] | None
    last: StepOutcome | None


async def rebuild(
    worker: Worker,
    key: str,
    source: EnvSource,
    kwargs: Mapping[str, Any],
    journal: Journal,
    *,
    timeout: float | None,
    slices: Slices,
) -> RebuiltPoint:
    """Rebuild an environment from a journal: make it, reset it, and take all steps again.

    Args:
        worker: The worker that will hold it.
        key: Its key there.
        source: Its entry point and arguments.
        kwargs: The client's kwargs.
        journal: The actions to replay; the environment must be deterministic.
        timeout: The time-out of each operation, in seconds.
        slices: Schedules replays that run in the event loop, so that other tasks get their turns in between.

    Raises:
        ReplayDiverged: The environment behaved differently this time; the worker holds nothing under the key.
        EnvironmentRaised: Its constructor raised.
        OperationTimeout: An operation took too long.
        WorkerLost: The worker died.
    """
    action_space, observation_space = await worker.make(key, source, kwargs, timeout=timeout)
    try:
        first, last = await _replay(worker, key, action_space, observation_space, journal, timeout, slices)
    except ReplayDiverged:
        await worker.close(key)
        raise
    if last is not None:
        journal.ended = (bool(last.terminated), bool(last.truncated))
    return RebuiltPoint(action_space, observation_space, first, last)


async def _replay(
    worker: Worker,
    key: str,
    action_space: Space[Any],
    observation_space: Space[Any],
    journal: Journal,
    timeout: float | None,
    slices: Slices,
) -> tuple[tuple[Any, Mapping[str, Any]] | None, StepOutcome | None]:
    if journal.seed is None:
        return None, None
    read_action = action_reader(action_space)
    # Of several at one step, the last one alone has an effect: it is all that the generator knows.
    reseeds = dict(journal.reseeds)
    number = -1
    last: StepOutcome | None = None
    try:
        observation, info = await worker.reset(
            key, journal.seed, decode_value(None, journal.options), timeout=timeout
        )
        _compare(observation_space, StepOutcome(observation, 0.0, False, False, {}), journal.reset_digest)
        for number, (action, digest) in enumerate(zip(journal.actions, journal.each_digest(), strict=True)):
            if number in reseeds:
                await slices.turn()
                await worker.reseed(key, reseeds[number], timeout=timeout)
            await slices.turn()
            last = await worker.step(key, read_action(action)[0], timeout=timeout)
            _compare(observation_space, last, digest)
        if journal.steps in reseeds:
            await slices.turn()
            await worker.reseed(key, reseeds[journal.steps], timeout=timeout)
    except (EnvironmentRaised, EncodeError, ProblemError, _Differs) as error:
        place = "the reset" if number < 0 else f"step {number}"
        raise ReplayDiverged(f"{place} went another way than before: {error}") from error
    return (observation, info), last


class _Differs(Exception):  # noqa: N818 - never leaves this module
    """A return value has another digest."""


def _compare(space: Space[Any], outcome: StepOutcome, expected: str | None) -> None:
    seen = encode_value(space, outcome.observation, binary=False)
    digest = step_digest(seen, outcome.reward, outcome.terminated, outcome.truncated)
    if digest != expected:
        raise _Differs(f"its digest is {digest}, not {expected}")
