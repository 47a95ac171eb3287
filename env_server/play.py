"""Episodes: reset, step, render and cancel on a session.

What runs in this process (`inline`) is answered at once, without a task and without an await: the handlers below
return a plain reply then. What runs elsewhere is one task for each operation, which `Running` names, so that a
repeated request can join it; the handlers return an awaitable then.
"""

import logging
import math
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any

from clients.protocol.errors import ProblemError
from clients.protocol.messages import RenderRequest, ResetRequest, StepRequest
from clients.protocol.values import EncodeError, encode_value
from env_server.context import Context
from env_server.failures import busy, environment_error, episode_over, not_reset, step_mismatch
from env_server.journal import JournalFile
from env_server.metrics import Metrics
from env_server.replies import Reply, encode_observation, reset_reply, step_reply
from env_server.running import Runner
from env_server.session import ResetRecord, Running, Session, StepRecord
from env_server.settings import Settings
from env_server.validation import invalid, validate
from env_server.workers.base import EnvironmentRaised, StepOutcome, WorkerLost

ENVELOPE = frozenset({"id", "op", "session_id"})
"""Fields of a frame that are not the operation's own."""

_STEP_FIELDS = ENVELOPE | {"action", "episode", "step", "autoreset", "timeout_s"}
_SEEDS = 2**53
_log = logging.getLogger(__name__)
_OPTIONAL_INDEX = (int, type(None))


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields of a call that takes none.

    Raises:
        ProblemError: `invalid_request`.
    """
    for name in fields.keys() - ENVELOPE:
        raise invalid(name, "this call has no such field")


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a frame that are the operation's own."""
    return {name: value for name, value in fields.items() if name not in ENVELOPE}


class Play:
    """The handlers of reset, step, render and cancel.

    Args:
        settings: Time-outs and the expert gate.
        metrics: Where steps and resets are counted.
        runner: Runs what does not run inline.
        journal_file: Where episodes are written down, if anywhere.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, runner: Runner, journal_file: JournalFile | None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._runner = runner
        self._journal_file = journal_file

    # -- reset ---------------------------------------------------------------------------------------------------

    def reset(
        self, context: Context, session: Session, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        """Begin an episode; a request id seen before is answered as before."""
        request = validate(ResetRequest, own_fields(fields))
        request_id = request.request_id
        binary = context.binary
        if request_id is not None and session.resets is not None and request_id in session.resets:
            return reset_reply(session, session.resets[request_id], binary=binary)
        running = session.running
        if running is not None:
            if running.kind == "reset" and request_id is not None and running.action == request_id:
                return self._reset_later(session, running, binary)
            raise busy(running)
        self.check_options(request.options)
        if session.inline is not None:
            record = self.reset_inline(session, request.seed, request.options, request_id)
            return self._encoded_reset(session, record, binary)
        body = self.reset_in_worker(session, request.seed, request.options, request_id)
        running = self._runner.start(session, "reset", body, action=request_id)
        return self._reset_later(session, running, binary)

    def check_options(self, options: Mapping[str, Any] | None) -> None:
        """Refuse options that the operator has not allowed.

        Raises:
            ProblemError: `forbidden`.
        """
        if options and options.get("expert") and not self._settings.allow_expert:
            raise ProblemError(
                "forbidden", "this server gives no expert actions (its setting is allow_expert)"
            )

    def reset_inline(
        self,
        session: Session,
        seed: int | None,
        options: dict[str, Any] | None,
        request_id: str | None = None,
    ) -> ResetRecord:
        """Begin an episode of an environment in this process.

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
            observation, info = session.inline.reset_now(session.session_id, seed, options)
        except EnvironmentRaised as error:
            raise self._broken(session, error) from error
        return self._begun(session, seed, options, observation, info, request_id)

    async def reset_in_worker(
        self,
        session: Session,
        seed: int | None,
        options: dict[str, Any] | None,
        request_id: str | None = None,
    ) -> ResetRecord:
        """Begin an episode of an environment in a worker; the body of a running operation."""
        seed = secrets.randbelow(_SEEDS) if seed is None else seed
        timeout = self._settings.make_timeout_s
        if session.attached:
            try:
                observation, info = await session.worker.reset(
                    session.session_id, seed, options, timeout=timeout
                )
            except WorkerLost:
                # Another session's fault took the worker down; a fresh environment serves as well.
                session.attached = False
        if not session.attached:
            await self._runner.make(session)
            observation, info = await session.worker.reset(session.session_id, seed, options, timeout=timeout)
        return self._begun(session, seed, options, observation, info, request_id)

    def _begun(
        self,
        session: Session,
        seed: int,
        options: dict[str, Any] | None,
        observation: Any,
        info: Mapping[str, Any],
        request_id: str | None,
    ) -> ResetRecord:
        try:
            written = encode_observation(session.observation_space, observation, binary=False)
        except EncodeError as error:
            raise self._broken(session, error) from error
        record = ResetRecord(observation, info, session.episode + 1, seed)
        session.begin_episode(record)
        session.last = None
        if request_id is not None:
            session.remember_reset(request_id, record)
        session.journal.begin(seed, options, written)
        env_id = session.entry.env_id
        self._metrics.resets[env_id] += 1
        if options and options.get("expert"):
            self._metrics.expert_resets[env_id] += 1
        if self._journal_file is not None:
            self._journal_file.began(session.session_id, record.episode, session.journal)
        return record

    async def _reset_later(self, session: Session, running: Running, binary: bool) -> Reply:
        record: ResetRecord = await self._runner.result(running)
        return self._encoded_reset(session, record, binary)

    def _encoded_reset(self, session: Session, record: ResetRecord, binary: bool) -> Reply:
        try:
            return reset_reply(session, record, binary=binary)
        except EncodeError as error:
            raise self._broken(session, error) from error

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self, context: Context, session: Session, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Take one step; one that is running is joined, the last one taken is answered again."""
        if not fields.keys() <= _STEP_FIELDS or "action" not in fields:
            validate(StepRequest, own_fields(fields))
        wire = fields["action"]
        episode = fields.get("episode")
        index = fields.get("step")
        autoreset = fields.get("autoreset", False)
        timeout_s = fields.get("timeout_s")
        if (
            type(index) not in _OPTIONAL_INDEX
            or type(episode) not in _OPTIONAL_INDEX
            or type(autoreset) is not bool
            or timeout_s is not None
        ):
            request = validate(StepRequest, own_fields(fields))
            autoreset, timeout_s = request.autoreset, request.timeout_s
        if (
            not session.playing
            or session.running is not None
            or (index is not None and index != session.step)
            or (episode is not None and episode != session.episode)
        ):
            return self._repeat(context, session, wire, episode, index)
        action, written = session.read_action(wire)
        inline = session.inline
        if inline is None or not session.attached:
            limit = session.entry.step_timeout_s
            timeout = limit if timeout_s is None else min(limit, timeout_s)
            body = self._step_in_worker(session, action, written, autoreset=autoreset, timeout=timeout)
            running = self._runner.start(
                session, "step", body, episode=session.episode, step=session.step, action=written
            )
            return self._step_later(session, running, context.binary)
        try:
            outcome = inline.step_now(session.session_id, action)
        except EnvironmentRaised as error:
            raise self._failed(session, written, error) from error
        record = self._taken(session, written, outcome)
        if autoreset and not session.playing:
            record = self._with_reset(session, record, self.reset_inline(session, None, None))
        return self._encoded_step(session, record, context.binary)

    async def _step_in_worker(
        self, session: Session, action: Any, written: Any, *, autoreset: bool, timeout: float
    ) -> StepRecord:
        record = self._taken(session, written, await self._outcome(session, action, timeout))
        if autoreset and not session.playing:
            if session.inline is not None:
                reset = self.reset_inline(session, None, None)
            else:
                reset = await self.reset_in_worker(session, None, None)
            record = self._with_reset(session, record, reset)
        return record

    async def _outcome(self, session: Session, action: Any, timeout: float) -> StepOutcome:
        await self._runner.attach(session)
        if not session.playing:
            raise episode_over(session)
        try:
            return await session.worker.step(session.session_id, action, timeout=timeout)
        except WorkerLost:
            # A worker's crash may be another session's doing: the episode is rebuilt and the step tried once more.
            self._runner.detach(session)
            await self._runner.attach(session)
            return await session.worker.step(session.session_id, action, timeout=timeout)

    def _taken(self, session: Session, written: Any, outcome: StepOutcome) -> StepRecord:
        """Move a session on by what its environment answered."""
        try:
            outcome = _normal(outcome)
            observation, reward, terminated, truncated, _ = outcome
            seen = encode_observation(session.observation_space, observation, binary=False)
        except EncodeError as error:
            raise self._failed(session, written, error) from error
        record = StepRecord(session.episode, session.step, written, outcome, seen)
        session.take_step(record, terminated=terminated, truncated=truncated)
        session.journal.record(written, seen, reward, terminated, truncated)
        self._metrics.steps[session.entry.env_id] += 1
        if self._journal_file is not None:
            self._journal_file.stepped(session.session_id, session.journal)
        return record

    def _with_reset(self, session: Session, record: StepRecord, reset: ResetRecord) -> StepRecord:
        record = record._replace(reset=reset)
        session.last = record
        return record

    def _encoded_step(self, session: Session, record: StepRecord, binary: bool) -> Reply:
        if isinstance(record.outcome, ProblemError):
            raise record.outcome
        try:
            return step_reply(session, record, record.outcome, binary=binary)
        except EncodeError as error:
            raise self._failed(session, record.action, error) from error

    async def _step_later(self, session: Session, running: Running, binary: bool) -> Reply:
        record: StepRecord = await self._runner.result(running)
        return self._encoded_step(session, record, binary)

    def _failed(self, session: Session, written: Any, error: EnvironmentRaised | EncodeError) -> ProblemError:
        """Note a step that the environment failed: asked again, it is answered by the same problem."""
        problem = self._broken(session, error)
        session.last = StepRecord(session.episode, session.step, written, problem)
        return problem

    def _broken(self, session: Session, error: EnvironmentRaised | EncodeError) -> ProblemError:
        session.playing = False
        session.recoverable = False
        _log.warning("%s failed in session %s: %s", session.entry.env_id, session.session_id, error)
        return environment_error(error)

    # -- steps that are not simply the next one ------------------------------------------------------------------

    def _repeat(
        self, context: Context, session: Session, wire: Any, episode: int | None, index: int | None
    ) -> Reply | Awaitable[Reply]:
        running = session.running
        if running is not None:
            if running.kind == "step" and index == running.step and episode in (None, running.episode):
                if _same_action(session, wire, running.action):
                    return self._step_later(session, running, context.binary)
                raise step_mismatch(session, f"step {index} is running with another action")
            raise busy(running)
        last = session.last
        if index is not None and last is not None and index == last.step and episode in (None, last.episode):
            if _same_action(session, wire, last.action):
                return self._encoded_step(session, last, context.binary)
            raise step_mismatch(session, f"step {index} was taken with another action")
        if index is not None and last is None and index == session.step - 1 and session.recoverable:
            # A session from the journal of a server that died: its last answer comes back with the environment.
            running = self._runner.start(session, "recovery", self._runner.attach(session))
            return self._repeat_later(context, session, running, wire, episode, index)
        if episode is not None and episode != session.episode:
            raise step_mismatch(session, f"the session is in episode {session.episode}, not {episode}")
        if session.episode < 0:
            raise not_reset(session)
        if index is not None and index != session.step:
            raise step_mismatch(session, f"the next step is {session.step}, not {index}")
        if session.terminated or session.truncated:
            raise episode_over(session)
        raise not_reset(session)

    async def _repeat_later(
        self,
        context: Context,
        session: Session,
        running: Running,
        wire: Any,
        episode: int | None,
        index: int,
    ) -> Reply:
        await self._runner.result(running)
        reply = self._repeat(context, session, wire, episode, index)
        return reply if isinstance(reply, dict) else await reply

    # -- render and cancel ---------------------------------------------------------------------------------------

    def render(self, context: Context, session: Session, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """Draw the state."""
        request = validate(RenderRequest, own_fields(fields))
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

    async def _render(self, session: Session, mode: str) -> Any:
        await self._runner.attach(session)
        return await session.worker.render(session.session_id, mode, timeout=session.entry.step_timeout_s)

    async def _rendered(self, running: Running, binary: bool) -> Reply:
        frame = await self._runner.result(running)
        try:
            return {"frame": encode_value(None, frame, binary=binary)}
        except EncodeError as error:
            raise environment_error(error) from error

    def cancel(self, context: Context, session: Session, fields: Mapping[str, Any]) -> Reply:
        """Give the running operation up; the session can be reset or closed."""
        refuse_fields(fields)
        if session.running is not None:
            session.running.task.cancel()
        return {}


def _normal(outcome: StepOutcome) -> StepOutcome:
    """An outcome with a finite float as its reward and with plain flags."""
    observation, reward, terminated, truncated, info = outcome
    if type(reward) is not float or type(terminated) is not bool or type(truncated) is not bool:
        try:
            reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"the reward or a flag is not a number: {error}") from error
        outcome = StepOutcome(observation, reward, terminated, truncated, info)
    if not math.isfinite(reward):
        raise EncodeError(f"the reward is {reward}")
    return outcome


def _same_action(session: Session, wire: Any, written: Any) -> bool:
    if wire is written or type(wire) is type(written) is str:
        return bool(wire == written)
    try:
        return bool(session.read_action(wire)[1] == written)
    except ProblemError:
        return False
