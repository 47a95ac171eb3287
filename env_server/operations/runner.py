"""Operations in workers: one task for each, its failures turned into problems, environments attached again."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import decode_value
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.common.setting_sections import TimeoutSettings
from rollgym.env_server.journal.journal import EndedStep, Journal
from rollgym.env_server.journal.replay import ReplayDiverged, rebuild
from rollgym.env_server.operations.failures import environment_error, not_in_time, not_reset, worker_died
from rollgym.env_server.sessions.session import NO_REQUEST, ResetRecord, Running, Session, StepRecord
from rollgym.env_server.sessions.sessions import Sessions, session_gone
from rollgym.env_server.telemetry.metrics import Metrics, RebuildOutcome
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    NoWorker,
    OperationTimeout,
    ServerFailed,
    ServerLost,
    StepOutcome,
    WorkerLost,
)

_TRIES = 2
_OF_THE_SERVER = (ServerFailed, ServerLost)
_ENDINGS = (
    *(EnvironmentRaised, OperationTimeout, WorkerLost, ServerFailed, ReplayDiverged),
    asyncio.CancelledError,
)
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Runner:
    """Runs operations that are not answered at once.

    Args:
        settings: Time-outs.
        metrics: Counts the times.
        sessions: Ends the sessions that cannot continue.
    """

    def __init__(self, settings: TimeoutSettings, metrics: Metrics, sessions: Sessions) -> None:
        self._settings = settings
        self._metrics = metrics
        self._sessions = sessions
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slices = Slices()

    def start(
        self,
        session: Session,
        kind: str,
        body: Coroutine[Any, Any, Any],
        *,
        episode: int = -1,
        step: int = -1,
        action: Any = None,
    ) -> Running:
        """Run an operation on a session that runs none.

        Raises:
            ProblemError: `session_gone`, if the session has ended.
        """
        try:
            self._sessions.require_open(session)
        except ProblemError:
            body.close()
            raise
        loop = asyncio.get_running_loop()
        task = loop.create_task(body)
        running = Running(kind, task, loop.create_future(), episode, step, action)
        session.running = running
        self._tasks.add(task)
        # Not code within the task: one that is cancelled before its first turn runs none.
        task.add_done_callback(partial(self._settle, session, running))
        return running

    async def result(self, running: Running) -> Any:
        """Wait for an operation; cancelling the wait does not cancel the operation.

        Raises:
            ProblemError: The operation failed with it.
        """
        return await asyncio.shield(running.outcome)

    async def recover(self, session: Session) -> None:
        """Rebuild a session's environment from its journal; concurrent callers share one recovery.

        Raises:
            ProblemError: The recovery failed with it, or `session_gone` if the session has ended since.
        """
        running = session.running
        if running is None:
            running = self.start(session, "recovery", self.attach(session))
        await self.result(running)
        self._sessions.require_open(session)

    async def idle(self, timeout_s: float) -> None:
        """Wait until no operation runs, or the time is over."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def make(self, session: Session) -> None:
        """Make the session's environment again, without an episode."""
        spaces = await session.worker.make(
            session.session_id, session.entry.source, session.kwargs, timeout=self._settings.make_timeout_s
        )
        session.take_spaces(*spaces)
        session.attached = True

    async def attach(self, session: Session) -> None:
        """Make sure that the worker holds the environment, at the session's point.

        Raises:
            ProblemError: `not_reset` or `session_gone`.
        """
        if session.attached:
            return
        if not session.recoverable:
            raise not_reset(session)
        await self.rebuild(session, session.journal)

    async def in_episode(self, session: Session, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a function on the session's environment, in its episode; the environment is rebuilt first if need be."""

        async def attached() -> _Result:
            await self.attach(session)
            return await operation()

        return await self.persist(session, attached)

    async def persist(self, session: Session, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a function in a worker that may die, and retry it if the worker did.

        A crash that another session caused does not count as a failure; an operation that takes its own worker down is
        tried twice. If workers die one after another, the wait is limited to that for an overloaded worker.

        Raises:
            WorkerLost: The operation took its worker down, or the session has ended.
            NoWorker: No worker lived for long enough in time.
        """
        faults = 0
        time = asyncio.get_running_loop().time
        give_up_at = math.inf
        while True:
            try:
                return await operation()
            except WorkerLost as lost:
                faults += lost.at_fault
                if faults == _TRIES or self._sessions.end_reason(session.session_id) is not None:
                    raise
                give_up_at = min(give_up_at, time() + self._settings.make_timeout_s)
                if time() >= give_up_at:
                    raise NoWorker(f"workers end before they answer: {lost}") from lost
                if isinstance(lost, ServerLost):
                    self._metrics.failovers[session.entry.label] += 1
                session.attached = False
                session.recoverable = session.episode >= 0

    async def rebuild(self, session: Session, journal: Journal) -> ResetRecord | None:
        """Rebuild the session's environment from a journal, by replay; return how its episode began.

        Raises:
            ProblemError: `session_gone`, if the environment cannot be rebuilt.
        """
        seed = journal.seed
        if seed is None:
            await self.make(session)
            return None
        if not session.entry.deterministic:
            self._sessions.end(session, "lost")
            raise session_gone(session.session_id, "lost")
        outcome: RebuildOutcome = "failed"
        try:
            point = await rebuild(
                session.worker,
                session.session_id,
                session.entry.source,
                session.kwargs,
                journal,
                timeout=self._settings.make_timeout_s,
                slices=self._slices,
            )
            outcome = "ok"
        except ReplayDiverged:
            outcome = "diverged"
            raise
        finally:
            self._metrics.rebuilds[session.entry.label, outcome] += 1
        session.take_spaces(point.action_space, point.observation_space)
        session.resume(max(0, session.episode), journal, point.last)
        if point.first is None:
            return None
        # Other answers may be requested again, but are unknown if the session outlived its process.
        began = ResetRecord(*point.first, session.episode, seed)
        session.remember_reset(journal.request_id or NO_REQUEST, began)
        if session.last is None and journal.before is not None:
            session.last = _answered(session, journal.before, began)
        return began

    def _settle(self, session: Session, running: Running, task: "asyncio.Task[Any]") -> None:
        """Record the result or the failure of an operation, and deliver it to those that wait for it."""
        self._tasks.discard(task)
        session.running = None
        session.last_used = asyncio.get_running_loop().time()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            running.outcome.set_result(task.result())
            return
        if isinstance(error, _ENDINGS):
            problem = self._problem(session, running.kind, error)
            problem.__cause__ = error
            of_server = isinstance(error, _OF_THE_SERVER)
            if running.kind == "step" and not of_server and not _was_taken(session, running):
                session.last = StepRecord(running.episode, running.step, running.action, problem)
            error = problem
        running.outcome.set_exception(error)
        # The caller may have left; the session keeps the problem if it matters.
        running.outcome.exception()

    def _problem(self, session: Session, kind: str, error: BaseException) -> ProblemError:
        """Turn a failure into a problem, and leave the session as that problem says."""
        ended = self._sessions.end_reason(session.session_id)
        if ended is not None:
            return session_gone(session.session_id, ended)
        if isinstance(error, ReplayDiverged):
            self._sessions.end(session, "replay_diverged")
            return session_gone(session.session_id, "replay_diverged")
        if isinstance(error, _OF_THE_SERVER) and kind != "reset":
            return _left_as_it_is(session, error)
        if session.playing:
            left = isinstance(error, asyncio.CancelledError)
            self._metrics.episodes[session.entry.label, "abandoned" if left else "error"] += 1
        session.playing = False
        session.recoverable = False
        if isinstance(error, EnvironmentRaised):
            return environment_error(error)
        session.attached = False
        if isinstance(error, _OF_THE_SERVER):
            return ProblemError("upstream_error", str(error))
        if isinstance(error, WorkerLost):
            return worker_died(session.entry.env_id)
        if isinstance(error, OperationTimeout):
            about = {"session_id": session.session_id, "env_id": session.entry.env_id}
            _log.warning("%s of %s: %s", kind, session.entry.env_id, error, extra=about)
            return not_in_time(f"the {kind} did not finish in time; reset the session", error)
        return ProblemError("step_timeout", f"the {kind} was cancelled; reset the session", cancelled=True)


def _was_taken(session: Session, running: Running) -> bool:
    """Whether the environment has answered a step, and it was the next episode that could not begin."""
    last = session.last
    return (
        last is not None
        and (last.episode, last.step) == (running.episode, running.step)
        and isinstance(last.outcome, StepOutcome)
    )


def _left_as_it_is(session: Session, error: ServerFailed | ServerLost) -> ProblemError:
    """The problem that a registered server failed an operation: the session is unchanged and can continue."""
    if isinstance(error, ServerLost):
        session.attached = False
        return ProblemError("upstream_error", f"{error}; the session is rebuilt at its next step")
    return ProblemError(
        "upstream_error", f"{error}; the session goes on where it was, but the step may have been taken"
    )


def _answered(session: Session, before: EndedStep, began: ResetRecord) -> StepRecord:
    """The last step of a session whose present episode it began."""
    outcome = StepOutcome(
        decode_value(session.observation_space, before.observation),
        before.reward,
        before.terminated,
        before.truncated,
        decode_value(None, before.info),
    )
    return StepRecord(before.episode, before.step, before.action, outcome, before.observation, began)
