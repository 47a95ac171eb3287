"""Operations in workers: one task for each, its failures turned into problems, environments attached again.

Problems show no more of an environment's failure than a client may see. The workers of one I/O process stand here, too,
by isolation.
"""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import Isolation
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value
from rollgym.env_server.catalog.catalog import Catalog, CatalogEntry
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.common.metrics import Metrics, RebuildOutcome
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings, TimeoutSettings
from rollgym.env_server.sessions.journal import EndedStep, Journal, ReplayDiverged, rebuild
from rollgym.env_server.sessions.session import NO_REQUEST, LocalSession, ResetRecord, Running, StepRecord
from rollgym.env_server.sessions.sessions import Sessions, session_gone
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    NoWorker,
    OperationTimeout,
    OptionsRefused,
    ServerFailed,
    ServerLost,
    StepOutcome,
    Worker,
    WorkerLost,
)
from rollgym.env_server.workers.inline import InlineWorker
from rollgym.env_server.workers.process import ProcessWorker
from rollgym.env_server.workers.thread import ThreadWorker
from rollgym.extras import install_line

# A name in a path may contain blanks if the path is quoted, or if another name follows; otherwise a blank ends it, or
# the words after a path would be taken for a part of it.
_NAME = r"[\w.@+~%$#,=-]+"
_PATHS = re.compile(
    r"file:/[^\s'\"]*"
    r"|(?<=['\"`])(?:~|[A-Za-z]:)?(?:[/\\][^/\\'\"`\n]{1,255}){1,64}[/\\]?(?=['\"`])"
    rf"|(?<![\w/:\\.])(?:~|[A-Za-z]:)?[/\\]{{1,2}}(?:{_NAME}(?: {_NAME}){{0,3}}[/\\]+){{1,64}}(?:{_NAME})?"
)
_MAX_MESSAGE = 500
_MOST_READ = 10_000
_TRIES = 2
_OF_THE_SERVER = (ServerFailed, ServerLost)
_ENDINGS = (
    *(EnvironmentRaised, OperationTimeout, WorkerLost, ServerFailed, ReplayDiverged),
    asyncio.CancelledError,
)
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


def environment_error(error: EnvironmentRaised | EncodeError | DecodeError) -> ProblemError:
    """The problem that an environment raised, or gave something that the wire has no form for.

    File paths are taken out of the message; the log has them. Options that it refuses are the client's fault.
    """
    if isinstance(error, EnvironmentRaised):
        error_class, message = error.error_class, error.message
    else:
        error_class, message = "ValueError", str(error)
    message = _PATHS.sub("<path>", message[:_MOST_READ])[:_MAX_MESSAGE]
    if isinstance(error, OptionsRefused):
        return invalid("options", f"the environment refuses them: {message}")
    return ProblemError("env_error", f"{error_class}: {message}", error_class=error_class, message=message)


def worker_died(env_id: str) -> ProblemError:
    """The problem that an operation took its worker down, each time it was tried."""
    return ProblemError(
        "env_error",
        f"the worker of {env_id} died",
        error_class="WorkerLost",
        message="the worker died",
    )


def not_in_time(detail: str, error: OperationTimeout) -> ProblemError:
    """The problem that an operation timed out; it says so if no worker was free to run it."""
    return ProblemError("step_timeout", f"{detail}: {error}" if isinstance(error, NoWorker) else detail)


def busy(running: Running) -> ProblemError:
    """The problem that another operation runs on the session."""
    return ProblemError("busy", f"a {running.kind} is running on this session", running=running.kind)


def episode_over(session: LocalSession) -> ProblemError:
    """The problem that the episode has ended."""
    return ProblemError(
        "episode_over", f"episode {session.episode} ended at step {session.step}; reset the session"
    )


def not_reset(session: LocalSession) -> ProblemError:
    """The problem that no episode runs."""
    if session.episode < 0:
        return ProblemError("not_reset", "the session was not reset yet")
    return ProblemError(
        "not_reset", f"episode {session.episode} broke off at step {session.step}; reset the session"
    )


def step_mismatch(session: LocalSession, detail: str) -> ProblemError:
    """The problem that a step names another place than the session is at."""
    episode = session.episode if session.episode >= 0 else None
    return ProblemError("step_mismatch", detail, episode=episode, step=session.step)


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
        session: LocalSession,
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

    async def recover(self, session: LocalSession) -> None:
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

    async def make(self, session: LocalSession) -> None:
        """Make the session's environment again, without an episode."""
        spaces = await session.worker.make(
            session.session_id, session.entry.source, session.kwargs, timeout=self._settings.make_timeout_s
        )
        session.take_spaces(*spaces)
        session.attached = True

    async def attach(self, session: LocalSession) -> None:
        """Make sure that the worker holds the environment, at the session's point.

        Raises:
            ProblemError: `not_reset` or `session_gone`.
        """
        if session.attached:
            return
        if not session.recoverable:
            raise not_reset(session)
        await self.rebuild(session, session.journal)

    async def in_episode(self, session: LocalSession, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a function on the session's environment, in its episode; the environment is rebuilt first if need be."""

        async def attached() -> _Result:
            await self.attach(session)
            return await operation()

        return await self.persist(session, attached)

    async def persist(self, session: LocalSession, operation: Callable[[], Awaitable[_Result]]) -> _Result:
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

    async def rebuild(self, session: LocalSession, journal: Journal) -> ResetRecord | None:
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

    def _settle(self, session: LocalSession, running: Running, task: "asyncio.Task[Any]") -> None:
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

    def _problem(self, session: LocalSession, kind: str, error: BaseException) -> ProblemError:
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


def _was_taken(session: LocalSession, running: Running) -> bool:
    """Whether the environment has answered a step, and it was the next episode that could not begin."""
    last = session.last
    return (
        last is not None
        and (last.episode, last.step) == (running.episode, running.step)
        and isinstance(last.outcome, StepOutcome)
    )


def _left_as_it_is(session: LocalSession, error: ServerFailed | ServerLost) -> ProblemError:
    """The problem that a registered server failed an operation: the session is unchanged and can continue."""
    if isinstance(error, ServerLost):
        session.attached = False
        return ProblemError("upstream_error", f"{error}; the session is rebuilt at its next step")
    return ProblemError(
        "upstream_error", f"{error}; the session goes on where it was, but the step may have been taken"
    )


def _answered(session: LocalSession, before: EndedStep, began: ResetRecord) -> StepRecord:
    """The last step of a session whose present episode it began."""
    outcome = StepOutcome(
        decode_value(session.observation_space, before.observation),
        before.reward,
        before.terminated,
        before.truncated,
        decode_value(None, before.info),
    )
    return StepRecord(before.episode, before.step, before.action, outcome, before.observation, began)


class WorkerPools:
    """Provides the worker of each isolation. Workers that no environment needs are not started.

    Args:
        settings: The numbers of threads and child processes, and where they run.
        remote: Runs the environments of registered servers.

    Attributes:
        threads: The worker of environments isolated by thread.
        processes: The worker of those isolated by process.
    """

    def __init__(self, settings: ServerSettings, remote: Worker) -> None:
        self._remote = remote
        self.threads = ThreadWorker(settings.threads)
        # With Ray, there are none here.
        count = 0 if settings.workers == "ray" else settings.workers
        self.processes = ProcessWorker(count, settings.log_format)
        self._most_threads = settings.threads
        self._make_timeout_s = settings.make_timeout_s
        self._workers: dict[Isolation, Worker] = {
            "inline": InlineWorker(),
            "thread": self.threads,
            "process": _process_worker(settings, self.processes),
        }
        self._started: list[Worker] = []

    def get(self, isolation: Isolation) -> Worker:
        """The worker of an isolation."""
        return self._workers[isolation]

    def of(self, entry: CatalogEntry) -> Worker:
        """The worker that runs an environment."""
        return self._remote if entry.source.kind == "registered" else self._workers[entry.isolation]

    def of_verifier(self, entry: CatalogEntry) -> Worker:
        """The worker that scores responses for an environment."""
        if entry.source.kind == "registered":
            return self._remote
        # A wait for the network would block a child process for all others.
        return self._workers["thread" if entry.isolation == "thread" else "process"]

    @property
    def trouble(self) -> str | None:
        """Why environments isolated by process cannot be made at present; None if they can."""
        return self._workers["process"].trouble

    @property
    def threads_stuck(self) -> bool:
        """Whether every thread is left to a call that took too long."""
        return self.threads.stuck >= self._most_threads

    async def start(self, catalog: Catalog) -> None:
        """Start the workers that the environments need, and make each of these once.

        Raises:
            ConfigurationError: If an environment cannot be made.
        """
        needed: set[Isolation] = {entry.isolation for entry in catalog}
        if any(entry.stateless and entry.isolation != "thread" for entry in catalog):
            needed.add("process")
        for isolation in sorted(needed):
            worker = self._workers[isolation]
            self._started.append(worker)
            await worker.start()
        await asyncio.gather(*(self._probe(entry) for entry in catalog))

    async def _probe(self, entry: CatalogEntry) -> None:
        # Children would import all that is built in before the first session.
        worker = self._workers["inline" if entry.built_in else entry.isolation]
        key = f"probe-{entry.env_id}"
        try:
            spaces = await worker.make(key, entry.source, {}, timeout=self._make_timeout_s)
        except (EnvironmentRaised, OperationTimeout, WorkerLost) as error:
            raise ConfigurationError(f"{entry.env_id} cannot be made without kwargs: {error}") from error
        entry.take_spaces(*spaces)
        await worker.close(key)

    async def shutdown(self) -> None:
        """End the workers and their environments."""
        for worker in self._started:
            await worker.shutdown()
        self._started.clear()
        await self._remote.shutdown()


def _process_worker(settings: ServerSettings, here: ProcessWorker) -> Worker:
    if settings.workers != "ray":
        return here
    try:
        # Ray is not part of the base install.
        from rollgym.env_server.workers.ray.worker import ray_worker
    except ImportError as error:
        raise ConfigurationError(
            f"`workers: ray` needs Ray, which cannot be imported ({error}): {install_line('ray')}"
        ) from error
    return ray_worker(settings)
