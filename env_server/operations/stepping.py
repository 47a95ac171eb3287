"""Taking steps.

A step of an environment in this process (inline) is the hot path of the server: the handler gives the reply at once,
without a model, a task or an await. A step elsewhere is one task, which the session names while it runs, so that a
repeated request can join it; the handler gives an awaitable then.
"""

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import StepRequest
from rollgym.clients.protocol.values import EncodeError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.requests import ENVELOPE, requested
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.operations.episodes import Resetting
from rollgym.env_server.operations.runner import (
    Runner,
    busy,
    environment_error,
    episode_over,
    not_reset,
    step_mismatch,
)
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.replies import Reply, detached, encode_observation, step_reply
from rollgym.env_server.sessions.session import LocalSession, Running, StepRecord
from rollgym.env_server.workers.base import EnvironmentRaised, StepOutcome

_PLAIN_FIELDS = ENVELOPE | {"action", "episode", "step", "autoreset", "reset"}
_SEEDS = 2**53
# JSON writes a control character with six signs.
_LONGEST_IN_JSON = 6


class NextEpisode(NamedTuple):
    """How the episode begins that follows one that a step ends; it comes with every step of a vector client."""

    seed: int | None = None
    options: dict[str, Any] | None = None


_NO_CHOICE = NextEpisode()


# Not frozen: one is made for every step, and a frozen one takes twice as long.
@dataclass(slots=True)
class StepOrder:
    """What a request asks for that takes a step.

    Attributes:
        action: The action, as it came.
        episode: The episode that the step is for; None for the one that runs.
        step: The index of the step; None for the next one.
        then: How the next episode begins if the step ends this one; None if none is to begin.
        timeout_s: How long the step may take; None for as long as the environment's steps may.
    """

    action: Any
    episode: int | None
    step: int | None
    then: NextEpisode | None
    timeout_s: float | None = None


class Stepping:
    """The handler of step.

    Args:
        settings: The settings that bound an episode.
        metrics: Counts steps.
        runner: Runs operations that are not inline.
        resetting: Begins the next episode if a step requests it.
        journal_file: The journal of steps, if there is one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        metrics: Metrics,
        runner: Runner,
        resetting: Resetting,
        journal_file: JournalFile | None,
    ) -> None:
        self._max_episode_bytes = settings.max_episode_bytes
        # Below this, no action that fits into a request passes the limit, however much longer it is in JSON.
        self._surely_short = settings.max_episode_bytes - _LONGEST_IN_JSON * settings.max_request_bytes
        self._metrics = metrics
        self._steps = metrics.steps
        self._runner = runner
        self._resetting = resetting
        self._journal_file = journal_file

    def step(
        self, context: Context, session: LocalSession, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        """Take one step; one that is running is joined, the last one taken is answered again."""
        episode, index = fields.get("episode"), fields.get("step")
        if not (
            "action" in fields
            and fields.keys() <= _PLAIN_FIELDS
            and (index is None or (type(index) is int and index >= 0))
            and (episode is None or (type(episode) is int and episode >= 0))
            and type(fields.get("autoreset", False)) is bool
            and ("reset" not in fields or _only_seeds(fields["reset"]))
        ):
            request = requested(StepRequest, fields)
            then = None
            if request.autoreset:
                chosen = request.reset
                then = _NO_CHOICE if chosen is None else NextEpisode(chosen.seed, chosen.options)
                self._resetting.check_options(session.entry, then.options)
            order = StepOrder(request.action, request.episode, request.step, then, request.timeout_s)
            return self._step(context, session, order)
        then = None
        if fields.get("autoreset"):
            then = NextEpisode(fields["reset"]["seed"]) if "reset" in fields else _NO_CHOICE
        return self._step(context, session, StepOrder(fields["action"], episode, index, then))

    def _step(self, context: Context, session: LocalSession, order: StepOrder) -> Reply | Awaitable[Reply]:
        if session.recoverable and not session.attached:
            running = session.running
            if running is None or running.kind == "recovery":
                return self._recovered(context, session, order)
        episode, index = order.episode, order.step
        if (
            not session.playing
            or session.running is not None
            or (index is not None and index != session.step)
            or (episode is not None and episode != session.episode)
        ):
            return self._repeat(context, session, order)
        action, written = session.read_action(order.action)
        if session.journal.most > self._surely_short:
            self._require_room(session, written)
        inline = session.inline
        if inline is None or not session.attached:
            body = self._step_in_worker(session, order, action, written)
            running = self._runner.start(
                session, "step", body, episode=session.episode, step=session.step, action=written
            )
            return self._later(context, session, running)
        try:
            outcome = inline.step_now(session.session_id, action)
        except EnvironmentRaised as error:
            raise self._failed(session, written, error) from error
        record = self._taken(session, written, outcome)
        then = order.then
        if then is not None and (session.terminated or session.truncated):
            record = self._begin_next(session, record, then)
        return self._encoded(context, session, record)

    def _require_room(self, session: LocalSession, written: Any) -> None:
        """Refuse an action with which the episode would be longer than one that can be restored.

        Raises:
            ProblemError: `too_large`.
        """
        size = session.journal.size_with(written)
        if size > self._max_episode_bytes:
            raise ProblemError(
                "too_large",
                f"this action was not taken: the episode would have {size} bytes with it, and max_episode_bytes "
                f"is {self._max_episode_bytes}; a shorter one goes on, or reset the session",
                limit=self._max_episode_bytes,
            )

    async def _step_in_worker(
        self, session: LocalSession, order: StepOrder, action: Any, written: Any
    ) -> StepRecord:
        limit = session.entry.step_timeout_s
        timeout = limit if order.timeout_s is None else min(limit, order.timeout_s)
        outcome = await self._runner.in_episode(
            session, lambda: session.worker.step(session.session_id, action, timeout=timeout)
        )
        record = self._taken(session, written, outcome)
        if order.then is not None and not session.playing:
            record = await self._begin_next_in_worker(session, record, order.then)
        return record

    async def _recovered(self, context: Context, session: LocalSession, order: StepOrder) -> Reply:
        """A step of a session from the journal of a process that died: its environment and its last answer first."""
        await self._runner.recover(session)
        reply = self._step(context, session, order)
        return reply if isinstance(reply, dict) else await reply

    def _taken(self, session: LocalSession, written: Any, outcome: StepOutcome) -> StepRecord:
        """Advance a session by its environment's answer."""
        try:
            observation, reward, terminated, truncated, info = outcome
            if (
                type(reward) is not float
                or type(terminated) is not bool
                or type(truncated) is not bool
                or not math.isfinite(reward)
            ):
                outcome = _plain_outcome(outcome)
                observation, reward, terminated, truncated, info = outcome
            seen = encode_observation(session.observation_space, observation, binary=False)
        except EncodeError as error:
            raise self._failed(session, written, error) from error
        record = StepRecord(session.episode, session.step, written, outcome, seen)
        session.take_step(record, terminated, truncated)
        session.journal.record(written, seen, reward, terminated, truncated)
        label = session.entry.label
        self._steps[label] += 1
        if terminated or truncated:
            self._metrics.episode_finished(label, info, terminated=terminated)
        if self._journal_file is not None:
            self._journal_file.stepped(session.session_id)
        return record

    def _begin_next(self, session: LocalSession, record: StepRecord, then: NextEpisode) -> StepRecord:
        """Begin the episode after the one that a step has ended."""
        kept = _detached(record)
        reset = self._resetting.inline(session, then.seed, then.options, ending=kept)
        session.last = kept._replace(reset=reset)
        return session.last

    async def _begin_next_in_worker(
        self, session: LocalSession, record: StepRecord, then: NextEpisode
    ) -> StepRecord:
        if session.inline is not None:
            return self._begin_next(session, record, then)
        kept = record if session.worker.isolation == "process" else _detached(record)
        reset = await self._resetting.in_worker(session, then.seed, then.options, ending=kept)
        session.last = kept._replace(reset=reset)
        return session.last

    def _encoded(self, context: Context, session: LocalSession, record: StepRecord) -> Reply:
        if isinstance(record.outcome, ProblemError):
            raise record.outcome
        try:
            return step_reply(session, record, record.outcome, context)
        except EncodeError as error:
            if session.last is not record:
                # The session has moved on since, so an error in a repeated answer does not fail it.
                raise environment_error(error) from error
            problem = self._resetting.broken(session, error)
            session.last = StepRecord(record.episode, record.step, record.action, problem)
            raise problem from error

    async def _later(self, context: Context, session: LocalSession, running: Running) -> Reply:
        record: StepRecord = await self._runner.result(running)
        return self._encoded(context, session, record)

    def _failed(
        self, session: LocalSession, written: Any, error: EnvironmentRaised | EncodeError
    ) -> ProblemError:
        """Record a step that failed in the environment: a retry gets the same problem."""
        problem = self._resetting.broken(session, error)
        session.last = StepRecord(session.episode, session.step, written, problem)
        return problem

    # -- steps that are not simply the next one ------------------------------------------------------------------

    def _repeat(self, context: Context, session: LocalSession, order: StepOrder) -> Reply | Awaitable[Reply]:
        episode, index = order.episode, order.step
        running = session.running
        if running is not None:
            if running.kind == "step" and index == running.step and episode in (None, running.episode):
                if _same_action(session, order.action, running.action):
                    return self._later(context, session, running)
                raise step_mismatch(session, f"step {index} is running with another action")
            raise busy(running)
        last = session.last
        if index is not None and last is not None and index == last.step and episode in (None, last.episode):
            if _same_action(session, order.action, last.action):
                if order.then is not None and _awaits_reset(session, last):
                    # The process that took the step died before it began the next episode.
                    body = self._begin_next_in_worker(session, last, order.then)
                    running = self._runner.start(
                        session, "step", body, episode=last.episode, step=last.step, action=last.action
                    )
                    return self._later(context, session, running)
                return self._encoded(context, session, last)
            raise step_mismatch(session, f"step {index} was taken with another action")
        if episode is not None and episode != session.episode:
            raise step_mismatch(session, f"the session is in episode {session.episode}, not {episode}")
        if session.episode < 0:
            raise not_reset(session)
        if index is not None and index != session.step:
            raise step_mismatch(session, f"the next step is {session.step}, not {index}")
        if session.terminated or session.truncated:
            raise episode_over(session)
        raise not_reset(session)


def _only_seeds(reset: Any) -> bool:
    """Whether a step sets only a seed for the next episode, as vector clients do with each step."""
    if type(reset) is not dict or len(reset) != 1:
        return False
    seed = reset.get("seed")
    return type(seed) is int and 0 <= seed < _SEEDS


def _awaits_reset(session: LocalSession, last: StepRecord) -> bool:
    """Whether a session's last step has ended its episode."""
    return (
        last.reset is None
        and (last.episode, last.step + 1) == (session.episode, session.step)
        and (session.terminated or session.truncated)
        and not isinstance(last.outcome, ProblemError)
    )


def _detached(record: StepRecord) -> StepRecord:
    """A record whose arrays and containers are its own: environments may write a reset into those of the last step."""
    outcome = record.outcome
    if isinstance(outcome, ProblemError):
        return record
    observation, info = detached(outcome.observation), detached(outcome.info)
    return record._replace(outcome=outcome._replace(observation=observation, info=info))


def _plain_outcome(outcome: StepOutcome) -> StepOutcome:
    """An outcome with a float as its reward and plain flags."""
    observation, reward, terminated, truncated, info = outcome
    try:
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f"the reward or a flag is not a number: {error}") from error
    except Exception as error:
        # They are objects of the environment.
        raise EncodeError(f"the reward or a flag cannot be read: {type(error).__name__}") from error
    if not math.isfinite(reward):
        raise EncodeError(f"the reward is {reward}")
    return StepOutcome(observation, reward, terminated, truncated, info)


def _same_action(session: LocalSession, wire: Any, written: Any) -> bool:
    if wire is written or type(wire) is type(written) is str:
        return bool(wire == written)
    try:
        return bool(session.read_action(wire)[1] == written)
    except ProblemError:
        return False
