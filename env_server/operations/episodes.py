"""Beginning episodes, and drawing the state that they are in."""

import logging
import secrets
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import RenderRequest, ResetRequest
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value, encode_value
from rollgym.env_server.access.context import Context
from rollgym.env_server.catalog.catalog import CatalogEntry
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.requests import invalid, requested
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.operations.runner import Runner, busy, environment_error, not_reset
from rollgym.env_server.sessions.journal import EndedStep
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.replies import Reply, detached, encode_given, encode_observation, reset_reply
from rollgym.env_server.sessions.session import LocalSession, ResetRecord, Running, StepRecord
from rollgym.env_server.workers.base import EnvironmentRaised, OptionsRefused, StepOutcome
from rollgym.envs.core.hooks import misfit

_SEEDS = 2**53
_REFUSED_BY_RESET = frozenset({"TypeError", "ValueError"})
_log = logging.getLogger(__name__)


class Resetting:
    """The handler of reset.

    An environment in this process (inline) is reset at once and the handler gives the reply; one elsewhere is reset
    by a task, and the handler gives an awaitable.

    Args:
        settings: Time-outs and the expert gate.
        metrics: Counts resets.
        runner: Runs operations that are not inline.
        journal_file: The journal of episodes, if there is one.
    """

    def __init__(
        self, settings: ServerSettings, metrics: Metrics, runner: Runner, journal_file: JournalFile | None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._runner = runner
        self._journal_file = journal_file

    def reset(
        self, context: Context, session: LocalSession, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        """Begin an episode; a request id seen before is answered as before."""
        request = requested(ResetRequest, fields)
        if request.again:
            return self._again(context, session)
        request_id = request.request_id
        if request_id is not None and session.resets is not None and request_id in session.resets:
            return self._encoded(context, session, session.resets[request_id])
        running = session.running
        if (
            request_id is not None
            and request_id == session.journal.request_id
            and session.recoverable
            and not session.attached
            and (running is None or running.kind == "recovery")
        ):
            return self._recalled(context, session, fields)
        if running is not None:
            if running.kind == "reset" and request_id is not None and running.action == request_id:
                return self._later(context, session, running)
            raise busy(running)
        self.check_options(session.entry, request.options)
        if session.inline is not None:
            record = self.inline(session, request.seed, request.options, request_id)
            return self._encoded(context, session, record)
        body = self.in_worker(session, request.seed, request.options, request_id)
        running = self._runner.start(session, "reset", body, action=request_id)
        return self._later(context, session, running)

    def check_options(self, entry: CatalogEntry, options: Mapping[str, Any] | None) -> None:
        """Refuse options that cannot be read, that there are not, or that the operator has not allowed.

        Raises:
            ProblemError: `invalid_request` or `forbidden`.
        """
        known = entry.reset_options
        # First, because it costs nothing, however much there is of an option that there is not.
        if options and known is not None and (wrong := misfit(known, options)) is not None:
            raise invalid("options", f"{entry.env_id}: {wrong}")
        try:
            encode_value(None, decode_value(None, options), binary=False)
        except (DecodeError, EncodeError) as error:
            raise invalid("options", str(error)) from error
        if options and options.get("expert") and not self._settings.allow_expert:
            raise ProblemError(
                "forbidden", "this server gives no expert actions (its setting is allow_expert)"
            )

    def inline(
        self,
        session: LocalSession,
        seed: int | None,
        options: dict[str, Any] | None,
        request_id: str | None = None,
        ending: StepRecord | None = None,
    ) -> ResetRecord:
        """Begin an episode of an environment in this process, after the step that ended the one before, if one did.

        Raises:
            ProblemError: `env_error`.
        """
        assert session.inline is not None
        seed = secrets.randbelow(_SEEDS) if seed is None else seed
        try:
            if not session.attached:
                entry = session.entry
                session.take_spaces(
                    *session.inline.make_now(session.session_id, entry.source, session.kwargs)
                )
                session.attached = True
            with _refusing(options):
                observation, info = session.inline.reset_now(
                    session.session_id, seed, decode_value(None, options)
                )
        except EnvironmentRaised as error:
            raise self.broken(session, error) from error
        return self._begun(session, seed, options, observation, info, request_id, ending)

    async def in_worker(
        self,
        session: LocalSession,
        seed: int | None,
        options: dict[str, Any] | None,
        request_id: str | None = None,
        ending: StepRecord | None = None,
    ) -> ResetRecord:
        """The same of an environment in a worker; the body of a running operation."""
        seed = secrets.randbelow(_SEEDS) if seed is None else seed
        given = decode_value(None, options)
        timeout = self._settings.make_timeout_s

        async def reset() -> tuple[Any, Mapping[str, Any]]:
            if not session.attached:
                await self._runner.make(session)
            with _refusing(options):
                return await session.worker.reset(session.session_id, seed, given, timeout=timeout)

        observation, info = await self._runner.persist(session, reset)
        return self._begun(session, seed, options, observation, info, request_id, ending)

    def _begun(
        self,
        session: LocalSession,
        seed: int,
        options: dict[str, Any] | None,
        observation: Any,
        info: Mapping[str, Any],
        request_id: str | None,
        ending: StepRecord | None,
    ) -> ResetRecord:
        try:
            written = encode_observation(session.observation_space, observation, binary=False)
        except EncodeError as error:
            raise self.broken(session, error) from error
        # In JSON's encoding, whatever encoding they came in.
        options = encode_value(None, decode_value(None, options), binary=False)
        label = session.entry.label
        if session.playing:
            self._metrics.episodes[label, "abandoned"] += 1
        if request_id is not None and session.worker.isolation != "process":
            # The client may retry it after steps have been taken.
            observation, info = detached(observation), detached(info)
        record = ResetRecord(observation, info, session.episode + 1, seed)
        session.begin_episode(record)
        session.last = None
        if request_id is not None:
            session.remember_reset(request_id, record)
        # This process remembers that step already; only the journal's file lacks it.
        before = _ended_step(ending) if ending is not None and self._journal_file is not None else None
        session.journal.begin(seed, options, written, before=before, request_id=request_id)
        self._metrics.resets[label] += 1
        if options and options.get("expert"):
            self._metrics.expert_resets[label] += 1
        if self._journal_file is not None:
            self._journal_file.began(session.session_id, record.episode)
        return record

    def _again(self, context: Context, session: LocalSession) -> Reply | Awaitable[Reply]:
        """How the running episode began; a repeated answer does not restart it."""
        began = session.began
        if began is not None:
            return self._encoded(context, session, began)
        running = session.running
        if session.recoverable and not session.attached and (running is None or running.kind == "recovery"):
            return self._replayed(context, session)
        if session.episode < 0:
            raise not_reset(session)
        raise ProblemError(
            "not_reset", "it is not known any more how this episode began; the next one that is reset tells"
        )

    async def _replayed(self, context: Context, session: LocalSession) -> Reply:
        """The same, if only a replay can say."""
        await self._runner.recover(session)
        reply = self._again(context, session)
        return reply if isinstance(reply, dict) else await reply

    async def _recalled(self, context: Context, session: LocalSession, fields: Mapping[str, Any]) -> Reply:
        """The answer that a process gave before it died: the replay gives it again."""
        await self._runner.recover(session)
        reply = self.reset(context, session, fields)
        return reply if isinstance(reply, dict) else await reply

    async def _later(self, context: Context, session: LocalSession, running: Running) -> Reply:
        record: ResetRecord = await self._runner.result(running)
        return self._encoded(context, session, record)

    def _encoded(self, context: Context, session: LocalSession, record: ResetRecord) -> Reply:
        try:
            return reset_reply(session.observation_space, record, context)
        except EncodeError as error:
            if (record.episode, 0) != (session.episode, session.step):
                # The session has moved on since, so an error in a repeated answer does not fail it.
                raise environment_error(error) from error
            raise self.broken(session, error) from error

    def broken(self, session: LocalSession, error: EnvironmentRaised | EncodeError) -> ProblemError:
        """Note that an environment failed, and give the problem; the session can be reset."""
        if session.playing:
            self._metrics.episodes[session.entry.label, "error"] += 1
        session.playing = False
        session.recoverable = False
        _log.warning("the environment failed: %s", error, extra={"session_id": session.session_id})
        return environment_error(error)


@contextmanager
def _refusing(options: dict[str, Any] | None) -> Iterator[None]:
    """Tell an environment that refuses the values of its options from one that fails."""
    try:
        yield
    except EnvironmentRaised as error:
        if options and error.is_one_of(_REFUSED_BY_RESET):
            raise OptionsRefused(error.error_class, error.message, error.builtin_bases) from error
        raise


def _ended_step(record: StepRecord) -> EndedStep | None:
    """A step as the journal keeps it; None if its answer is a problem."""
    outcome = record.outcome
    if not isinstance(outcome, StepOutcome):
        return None
    try:
        info = encode_given(None, outcome.info, binary=False)
    except EncodeError:
        return None
    return EndedStep(record.episode, record.step, record.action, record.seen, *outcome[1:4], info)


class Rendering:
    """The handler of render.

    Args:
        runner: Runs the drawing.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def render(self, context: Context, session: LocalSession, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """Render the environment's current state."""
        request = requested(RenderRequest, fields)
        modes = session.entry.render_modes
        mode = request.mode if request.mode is not None else next(iter(modes), None)
        if mode is None or mode not in modes:
            raise invalid("mode", f"{session.entry.env_id} renders {' or '.join(modes) or 'nothing'}")
        if session.running is not None:
            raise busy(session.running)
        if session.episode < 0:
            raise not_reset(session)
        running = self._runner.start(session, "render", self._render(session, mode))
        return self._rendered(running, context.binary)

    async def _render(self, session: LocalSession, mode: str) -> Any:
        timeout = session.entry.step_timeout_s
        return await self._runner.in_episode(
            session, lambda: session.worker.render(session.session_id, mode, timeout=timeout)
        )

    async def _rendered(self, running: Running, binary: bool) -> Reply:
        frame = await self._runner.result(running)
        try:
            return {"frame": encode_given(None, frame, binary=binary)}
        except EncodeError as error:
            raise environment_error(error) from error
