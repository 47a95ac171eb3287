"""The journal that several gateways share: the answers of each session, its node, and the right to move it.

It is in Redis, or in a server of the same protocol. A gateway sends no answer of a session before the journal has
acknowledged it and confirmed the session's node. Each move of a session to another node has a number, its generation (a
fencing token: Martin Kleppmann, "How to do distributed locking", 2016): a gateway that was away during the move has an
older number, and is refused.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

import msgpack
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.journal_entries import (
    LEASE_S,
    About,
    Arguments,
    Claim,
    Head,
    JournalAway,
    Opened,
    SharedSession,
    Unreadable,
    Write,
    flags,
    packed_steps,
    read_steps,
)
from rollgym.env_server.gateway.journal_watch import JournalWatch
from rollgym.env_server.journal.journal import END_REASONS, EndReason
from rollgym.env_server.telemetry.durations import Durations

_PREFIX = "rollgym:session:"
_TRIAL = "rollgym:trial"
_SCRIPT = "shared_journal.lua"
_HOLDER_BYTES = 8
# A gateway that gets no answer in this time reports that to its client, which retries.
_ANSWER_S = 2.0
# One of them is the watch's.
_CONNECTIONS = 9
_MOST_WRITES = 1024
_MOST_BYTES = 4 * 1024 * 1024
# uvloop raises RuntimeError on a write to a closed transport.
_BROKEN = (RedisError, OSError, TimeoutError, RuntimeError)
# Errors of reading entries that were not written by this module.
_UNREADABLE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    StopIteration,
    msgpack.exceptions.UnpackException,
)
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
# How long it is remembered that a session has ended, and how much longer than a session lives it is kept.
_GRAVE_S = 3600.0
_MARGIN_S = 600.0

_log = logging.getLogger(__name__)


Answered = Callable[[], Mapping[str, tuple[int, int]]]
"""The last answers of a gateway: the episode of each session, and the number of its steps."""


class SharedJournal:
    """The journal in Redis.

    Writes of one turn of the event loop go out together, and one batch at a time. No call waits for longer than a few
    seconds; while the journal is known to be away, only reconnects are tried.

    Args:
        url: Its address: `redis://`, `rediss://` or `unix://`.

    Attributes:
        calls: Calls to its server, by command and outcome: `ok`, or `away` if no valid answer came.
        call_seconds: The durations of answered calls, by command.
        sent_bytes: Bytes of the records in them.
        writes: The events of sessions, by result: see `Write.done`.
        write_seconds: From an event to its result, which is the delay of a step.

    Raises:
        ConfigurationError: The URL is invalid.
    """

    def __init__(self, url: str) -> None:
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=_ANSWER_S,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                # For connections that were idle while the server restarted; each command may be repeated.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        except ValueError as error:
            raise ConfigurationError(f"journal_url cannot be read: {error}") from error
        self._redis = Redis(connection_pool=pool)
        self._holder = secrets.token_hex(_HOLDER_BYTES)
        self._script = files("rollgym.env_server.gateway").joinpath(_SCRIPT).read_text("utf-8")
        self._digest = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._loop = asyncio.get_running_loop()
        self._queue: list[tuple[Write, float]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._watch = JournalWatch(self._redis, self._mark)
        self._watching: asyncio.Task[None] | None = None
        self._answered: Answered = dict
        self._trouble: str | None = "it was not reached yet"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.call_seconds: defaultdict[str, Durations] = defaultdict(Durations)
        self.sent_bytes = 0
        self.writes: Counter[str] = Counter()
        self.write_seconds = Durations()

    @property
    def trouble(self) -> str | None:
        """Why the journal cannot be used at present, if it cannot."""
        return self._trouble

    @property
    def waiting(self) -> int:
        """How many writes have not gone out yet."""
        return len(self._queue)

    @property
    def settling_s(self) -> float:
        """Seconds until sessions may be rebuilt: other gateways may still know steps that the journal has lost."""
        return self._watch.settling_s

    async def start(self, answered: Answered = dict) -> None:
        """Connect to the journal; if it is away, keep trying in the background.

        Args:
            answered: Returns the last answer of each session here: its episode, and the number of its steps.
        """
        self._answered = answered
        self._watching = self._loop.create_task(self._watch.run())
        try:
            await self._look()
        except JournalAway as away:
            _log.error("the shared journal cannot be used yet: %s", away)
            return
        await self._warn()

    async def close(self) -> None:
        """Write the pending entries, and disconnect."""
        if self._flushing is not None:
            await asyncio.wait([self._flushing], timeout=2 * _ANSWER_S)
        for task in (self._flushing, self._reaching, self._watching):
            if task is not None:
                task.cancel()
        await self._redis.aclose()

    def require(self) -> None:
        """Refuse operations that could not be recorded.

        Raises:
            ProblemError: `draining`.
        """
        if self._trouble is not None:
            raise JournalAway(self._trouble).problem()

    # -- what gateways see ---------------------------------------------------------------------------------------

    def write(self, write: Write) -> None:
        """Write an event of a session, at the end of this turn of the loop."""
        self._queue.append((write, time.perf_counter()))
        if self._flushing is None:
            self._flushing = self._loop.create_task(self._flush())

    async def written(self, session_id: str, arguments: Arguments) -> str:
        """Write an event and wait for its result; see `Write.done`."""
        status: asyncio.Future[str] = self._loop.create_future()
        self.write(
            Write(session_id, arguments, lambda each: None if status.done() else status.set_result(each))
        )
        return await status

    async def _flush(self) -> None:
        try:
            while self._queue:
                waited = self._next_writes()
                try:
                    arguments = [argument for write, _ in waited for argument in write.arguments]
                    statuses = await self._run("write", [write.session_id for write, _ in waited], arguments)
                except JournalAway as away:
                    statuses = [f"away: {away}".encode()] * len(waited)
                now = time.perf_counter()
                for (write, since), status in zip(waited, statuses, strict=True):
                    self.write_seconds.add(now - since)
                    self.writes[status.partition(b":")[0].decode()] += 1
                    write.done(status.decode())
        finally:
            self._flushing = None

    def _next_writes(self) -> list[tuple[Write, float]]:
        """The next batch: no larger than the server can process in one call without blocking others."""
        count = size = 0
        for write, _ in self._queue[:_MOST_WRITES]:
            size += sum(len(each) for each in write.arguments if isinstance(each, bytes))
            if count and size > _MOST_BYTES:
                break
            count += 1
        writes, self._queue = self._queue[:count], self._queue[count:]
        return writes

    # -- sessions ------------------------------------------------------------------------------------------------

    async def open(self, opened: Iterable[Opened]) -> None:
        """Take in new sessions, all or none.

        Raises:
            JournalAway: It is not known whether they were taken in.
        """
        sessions = list(opened)
        arguments: list[Any] = []
        for each in sessions:
            arguments += [each.about.pack(), _milliseconds(each.about.idle_timeout_s + _MARGIN_S)]
            arguments += [each.node, each.upstream_id, each.episode]
            arguments += [b"" if each.head is None else each.head.pack(), flags(each.over), len(each.actions)]
            arguments += await packed_steps(each.actions, each.digests)
        await self._run("open", [each.session_id for each in sessions], arguments)

    async def load(self, session_id: str) -> SharedSession | None:
        """Load a session; None if it does not exist or cannot be read.

        Raises:
            JournalAway: It is not known.
        """
        content, moving_ms = await self._run("load", [session_id], [])
        found = dict(zip(content[::2], content[1::2], strict=True))
        if not found:
            return None
        try:
            return _session(found, moving_ms)
        except _UNREADABLE as error:
            # It will not be readable later either.
            _log.error("what the shared journal has of session %s cannot be read: %r", session_id, error)
            return None

    async def claim(self, session_id: str, generation: int) -> Claim | str:
        """Claim the right to move a session of this generation; return the reason if it is refused.

        The reason is `behind` if a gateway has answered more than the journal holds.

        Raises:
            JournalAway: The journal did not answer.
            Unreadable: The claim succeeded, but the journal's data of the session cannot be read.
        """
        arguments = [generation, self._holder, _milliseconds(LEASE_S)]
        status, *rest = await self._run("claim", [session_id], arguments)
        if status != b"ok":
            return cast(str, status.decode())
        episode, head, steps = rest
        try:
            return Claim(generation + 1, episode, Head.read(head), await read_steps(steps))
        except _UNREADABLE as error:
            raise Unreadable(
                f"what the shared journal has of {session_id} cannot be read: {error!r}"
            ) from error

    async def renew(self, session_id: str, generation: int) -> str:
        """Keep the right to move a session; `ok`, or why it is lost."""
        return await self._status("renew", session_id, [generation, _milliseconds(LEASE_S)])

    async def moved(self, session_id: str, generation: int, node: str, upstream_id: str) -> str:
        """Record the new node of a session; return `ok`, or why that was refused."""
        return await self._status("moved", session_id, [generation, node, upstream_id])

    async def stays(self, session_id: str, generation: int) -> str:
        """Give back the right to move a session; it stays at its node."""
        return await self._status("moved", session_id, [generation])

    async def end(
        self, session_ids: Sequence[str], reason: EndReason, generation: int | None = None
    ) -> list[tuple[str, str, str]]:
        """Write that sessions have ended.

        Args:
            session_ids: The ids of the sessions.
            reason: The reason.
            generation: End them only in this generation; in any, if None.

        Returns:
            For each `ok` or why not, its node and its id there.

        Raises:
            JournalAway: It is unknown whether they have ended.
        """
        ends: list[tuple[str, str, str]] = []
        for first in range(0, len(session_ids), _MOST_WRITES):
            some = session_ids[first : first + _MOST_WRITES]
            arguments: list[Any] = [reason, _milliseconds(_GRAVE_S)]
            arguments += ["" if generation is None else generation] * len(some)
            for status, node, upstream_id in await self._run("close", some, arguments):
                ends.append((status.decode(), _text(node), _text(upstream_id)))
        return ends

    async def _mark(self) -> None:
        """Report the answered steps to the journal, in case it has fewer.

        Raises:
            JournalAway: It is unknown whether the journal has recorded them.
        """
        places = list(self._answered().items())
        behind = 0
        for first in range(0, len(places), _MOST_WRITES):
            some = places[first : first + _MOST_WRITES]
            arguments = [number for _, place in some for number in place]
            behind += await self._run("mark", [session_id for session_id, _ in some], arguments)
        if behind:
            _log.error("the shared journal went back behind what %d sessions were answered", behind)

    async def _status(self, command: str, session_id: str, arguments: Sequence[Any]) -> str:
        return cast(str, (await self._run(command, [session_id], arguments)).decode())

    # -- Redis ---------------------------------------------------------------------------------------------------

    async def _run(self, command: str, session_ids: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run the script.

        Raises:
            JournalAway: It did not answer that it was done.
        """
        if self._trouble is not None:
            raise JournalAway(self._trouble)
        keys = [_PREFIX + session_id for session_id in session_ids]
        self.sent_bytes += sum(len(each) for each in arguments if type(each) is bytes)
        began = time.perf_counter()
        try:
            answer = await self._evaluate(command, keys, arguments)
        except _BROKEN as error:
            self.calls[command, "away"] += 1
            self._lost(str(error) or type(error).__name__)
            raise JournalAway(self._trouble or "it does not answer") from error
        self.calls[command, "ok"] += 1
        self.call_seconds[command].add(time.perf_counter() - began)
        return answer

    async def _evaluate(self, command: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        evaluate: Callable[..., Awaitable[Any]] = self._redis.execute_command
        try:
            return await evaluate("EVALSHA", self._digest, len(keys), *keys, command, *arguments)
        except NoScriptError:
            # Redis has restarted, or this is the first call.
            await evaluate("SCRIPT LOAD", self._script)
            return await evaluate("EVALSHA", self._digest, len(keys), *keys, command, *arguments)

    def _lost(self, trouble: str) -> None:
        if self._trouble is None:
            _log.error("the shared journal cannot be used: %s", trouble)
        self._trouble = trouble
        if self._reaching is None:
            self._reaching = self._loop.create_task(self._reach())

    async def _reach(self) -> None:
        """Try until the journal can be written to again."""
        pause = _FIRST_PAUSE_S
        try:
            while self._trouble is not None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
                try:
                    await self._try()
                except JournalAway as away:
                    self._trouble = str(away)
            _log.warning("the shared journal can be used again")
        finally:
            self._reaching = None

    async def _look(self) -> None:
        try:
            await self._try()
        except JournalAway as away:
            self._lost(str(away))
            raise

    async def _try(self) -> None:
        try:
            await self._evaluate("try", [_TRIAL], [])
        except _BROKEN as error:
            raise JournalAway(str(error) or type(error).__name__) from error
        self._trouble = None

    async def _warn(self) -> None:
        """Warn the operator of settings under which acknowledged writes may be lost."""
        try:
            found = await self._redis.info("memory", "persistence")
        except _BROKEN:
            # Not every user may read that setting.
            return
        policy = found.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            _log.warning(
                "the shared journal may evict sessions: set maxmemory-policy noeviction, not %s", policy
            )
        if not found.get("aof_enabled", 1):
            _log.warning("the shared journal does not outlive its server: set appendonly yes")


def _session(found: dict[bytes, bytes], moving_ms: int) -> SharedSession:
    ended = found.get(b"ended")
    reason = None if ended is None else next(each for each in END_REASONS if each == ended.decode())
    over = int(found[b"over"])
    return SharedSession(
        about=About.read(found[b"about"]),
        generation=int(found[b"generation"]),
        node=found[b"node"].decode(),
        upstream_id=found[b"upstream_id"].decode(),
        episode=int(found[b"episode"]),
        steps=int(found[b"steps"]),
        head=Head.read(found[b"head"]),
        over=(bool(over & 1), bool(over & 2)),
        ended=reason,
        moving_s=moving_ms / 1000 if b"holder" in found else None,
    )


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


def _text(content: Any) -> str:
    return content.decode() if isinstance(content, bytes) else ""
