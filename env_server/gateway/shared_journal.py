"""The journal that several gateways share: the answers of each session, its node, and the right to move it.

It is in Redis, or in a server of the same protocol. A gateway sends no answer of a session before the journal has
acknowledged it and confirmed the session's node. Each move of a session to another node has a number, its generation (a
fencing token: Martin Kleppmann, "How to do distributed locking", 2016): a gateway that was away during the move has an
older number, and is refused. The journal may also be another one than before, after a fail-over: a watch notices it.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgpack

from rollgym.env_server.common.metrics import Durations
from rollgym.env_server.gateway.journal_entries import (
    ENDED,
    LEASE_S,
    About,
    Arguments,
    Claim,
    DamagedEntryError,
    EpisodeStart,
    JournalAway,
    Opened,
    SharedSession,
    Unreadable,
    Write,
    flags,
    packed_steps,
    read_steps,
)
from rollgym.env_server.gateway.journal_server import ANSWER_S, PREFIX, JournalServer, milliseconds
from rollgym.env_server.gateway.journal_watch import JournalWatch
from rollgym.env_server.sessions.journal import END_REASONS, EndReason

_HOLDER_BYTES = 8
_MOST_WRITES = 1024
_MOST_BYTES = 4 * 1024 * 1024
# Errors of reading entries that no gateway has written.
_UNREADABLE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    StopIteration,
    msgpack.exceptions.UnpackException,
)
# How long it is remembered that a session has ended, and how much longer than a session lives it is kept.
_GRAVE_S = 3600.0
_MOST_GRAVES = 65_536
_MARGIN_S = 600.0

Answered = Callable[[], Mapping[str, tuple[int, int]]]
"""The last answers of a gateway: the episode of each session that it has, and the number of its steps."""

Ended = Callable[[str, EndReason], bool]
"""Ends a session that ended elsewhere, if the gateway has it; returns whether it has."""

_log = logging.getLogger(__name__)


class SharedJournal:
    """The journal in Redis.

    Writes of one turn of the event loop go out together, and one batch at a time. No call waits for longer than a few
    seconds; while the journal is known to be away, only reconnects are tried.

    Args:
        url: Its address: `redis://`, `rediss://` or `unix://`.
        replicas: How many replicas must confirm each write; with any, a fail-over to the one that is ahead of the
            others loses nothing.

    Attributes:
        writes: The events of sessions, by result: see `Write.done`.
        write_seconds: From an event to its result, which is the delay of a step.
        damage: How often entries of a session were found to be damaged or missing; the session is lost.

    Raises:
        ConfigurationError: The URL is invalid.
    """

    def __init__(self, url: str, replicas: int = 0) -> None:
        self._server = JournalServer(url, replicas)
        self._holder = secrets.token_hex(_HOLDER_BYTES)
        self._loop = asyncio.get_running_loop()
        self._queue: list[tuple[Write, float]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._watch = JournalWatch(self._server.redis, self._mark, self._hear)
        self._watching: asyncio.Task[None] | None = None
        self._answered: Answered = dict
        self._ended: Ended = _has_none
        # Sessions that are known to have ended: why, and until when to remember it.
        self._graves: OrderedDict[str, tuple[EndReason, float]] = OrderedDict()
        self.writes: Counter[str] = Counter()
        self.write_seconds = Durations()
        self.damage = 0

    @property
    def trouble(self) -> str | None:
        """Why the journal cannot be used at present, if it cannot."""
        return self._server.trouble

    @property
    def calls(self) -> Mapping[tuple[str, str], int]:
        """Calls to its server, by command and outcome.

        The outcome is `ok`, `unconfirmed` if too few replicas confirmed it in time, or `away` if no valid answer came.
        """
        return self._server.calls

    @property
    def call_seconds(self) -> Mapping[str, Durations]:
        """The durations of answered calls, by command."""
        return self._server.call_seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes of the records in calls."""
        return self._server.sent_bytes

    @property
    def waiting(self) -> int:
        """How many writes have not gone out yet."""
        return len(self._queue)

    @property
    def settling_s(self) -> float:
        """Seconds until sessions may be rebuilt: other gateways may still know steps that the journal has lost."""
        return self._watch.settling_s

    async def start(self, answered: Answered = dict, ended: Ended | None = None) -> None:
        """Connect to the journal; if it is away, keep trying in the background.

        Args:
            answered: Returns the last answer of each session here: its episode, and the number of its steps.
            ended: Called with each session that another gateway has ended.
        """
        self._answered = answered
        self._ended = ended or _has_none
        self._watching = self._loop.create_task(self._watch.run())
        await self._server.start()

    async def close(self) -> None:
        """Write the pending entries, and disconnect."""
        if self._flushing is not None:
            await asyncio.wait([self._flushing], timeout=2 * ANSWER_S)
        for task in (self._flushing, self._watching):
            if task is not None:
                task.cancel()
        await self._server.close()

    def require(self) -> None:
        """Refuse operations that could not be recorded.

        Raises:
            ProblemError: `draining`.
        """
        if self.trouble is not None:
            raise JournalAway(self.trouble).problem()

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
                    statuses = await self._server.run(
                        "write", [write.session_id for write, _ in waited], arguments
                    )
                except JournalAway as away:
                    statuses = [f"away: {away}".encode()] * len(waited)
                now = time.perf_counter()
                for (write, since), status in zip(waited, statuses, strict=True):
                    self.write_seconds.add(now - since)
                    result = self._read_status(write.session_id, status)
                    self.writes[result.partition(":")[0]] += 1
                    write.done(result)
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
            place = each.session_id, each.episode
            arguments += [each.about.pack(each.session_id)]
            arguments += [milliseconds(each.about.idle_timeout_s + _MARGIN_S)]
            arguments += [each.node, each.upstream_id, each.episode]
            arguments += [b"" if each.head is None else each.head.pack(*place)]
            arguments += [flags(each.over), len(each.actions)]
            arguments += await packed_steps(*place, each.actions, each.digests)
        await self._server.run("open", [each.session_id for each in sessions], arguments)

    async def load(self, session_id: str) -> SharedSession | None:
        """Load a session; None if it does not exist or cannot be read.

        Raises:
            JournalAway: It is not known.
        """
        content, moving_ms, steps = await self._server.run("load", [session_id], [])
        found = dict(zip(content[::2], content[1::2], strict=True))
        if not found:
            return None
        try:
            session = _session(session_id, found, moving_ms, steps)
        except _UNREADABLE as error:
            # It will not be readable later either.
            self._note_damage(session_id, repr(error))
            return None
        if session.ended is not None:
            self._bury(session_id, session.ended)
        elif session_id in self._graves:
            # The journal went back behind its end.
            return replace(session, ended=self._graves[session_id][0])
        return session

    async def claim(self, session_id: str, generation: int) -> Claim | str:
        """Claim the right to move a session of this generation; return the reason if it is refused.

        The reason is `behind` if a gateway has answered more than the journal holds.

        Raises:
            JournalAway: The journal did not answer.
            Unreadable: The claim succeeded, but the journal's data of the session cannot be read.
        """
        arguments = [generation, self._holder, milliseconds(LEASE_S)]
        status, *rest = await self._server.run("claim", [session_id], arguments)
        if status != b"ok":
            return self._read_status(session_id, status)
        episode, head, steps = rest
        try:
            return Claim(
                generation + 1,
                episode,
                EpisodeStart.read(head, session_id, episode),
                await read_steps(session_id, episode, steps),
            )
        except _UNREADABLE as error:
            self.damage += 1
            raise Unreadable(
                f"what the shared journal has of {session_id} cannot be read: {error!r}"
            ) from error

    async def renew(self, session_id: str, generation: int) -> str:
        """Keep the right to move a session; `ok`, or why it is lost."""
        return await self._status("renew", session_id, [generation, milliseconds(LEASE_S)])

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
            arguments: list[Any] = [reason, milliseconds(_GRAVE_S)]
            arguments += ["" if generation is None else generation] * len(some)
            found = await self._server.run("close", some, arguments)
            for session_id, (status, node, upstream_id) in zip(some, found, strict=True):
                result = self._read_status(session_id, status)
                if result == "ok":
                    self._bury(session_id, reason)
                ends.append((result, _text(node), _text(upstream_id)))
        return ends

    def _read_status(self, session_id: str, status: bytes) -> str:
        """What the script says of a session; a damaged one is missing."""
        result = status.decode()
        if result == "damaged":
            self._note_damage(session_id, "there are other entries than its state says")
            return "missing"
        ended = result.removeprefix(ENDED)
        if ended != result:
            # A reason that is damaged is none.
            self._bury(session_id, next((each for each in END_REASONS if each == ended), "lost"))
        return result

    def _note_damage(self, session_id: str, how: str) -> None:
        self.damage += 1
        _log.error(
            "what the shared journal has of session %s is damaged, and the session lost: %s", session_id, how
        )

    def _bury(self, session_id: str, reason: EndReason) -> None:
        """Remember that a session has ended, in case the journal goes back behind that."""
        now = self._loop.time()
        self._graves.setdefault(session_id, (reason, now + _GRAVE_S))
        while self._graves and (
            len(self._graves) > _MOST_GRAVES or next(iter(self._graves.values()))[1] < now
        ):
            self._graves.popitem(last=False)

    def _hear(self, message: bytes) -> None:
        reason, *keys = message.decode(errors="replace").split(" ")
        for key in keys:
            self._ended_elsewhere(key.removeprefix(PREFIX), reason)

    def _ended_elsewhere(self, session_id: str, reason: str) -> None:
        known: EndReason = next((each for each in END_REASONS if each == reason), "lost")
        if self._ended(session_id, known):
            self._bury(session_id, known)

    async def _mark(self) -> None:
        """Report ends and answered steps to the journal, in case it has fewer.

        Raises:
            JournalAway: It is unknown whether the journal has recorded them.
        """
        again = 0
        for reason in END_REASONS:
            ended = [session_id for session_id, (why, _) in self._graves.items() if why == reason]
            again += sum(status == "ok" for status, _, _ in await self.end(ended, reason))
        if again:
            _log.error(
                "the shared journal went back behind the end of %d sessions; they are ended again", again
            )
        places = list(self._answered().items())
        behind = 0
        for first in range(0, len(places), _MOST_WRITES):
            some = places[first : first + _MOST_WRITES]
            arguments = [number for _, place in some for number in place]
            here = [session_id for session_id, _ in some]
            less, ends = await self._server.run("mark", here, arguments)
            behind += less
            for session_id, reason in zip(here, ends, strict=True):
                if reason:
                    self._ended_elsewhere(session_id, _text(reason))
        if behind:
            _log.error("the shared journal went back behind what %d sessions were answered", behind)

    async def _status(self, command: str, session_id: str, arguments: Sequence[Any]) -> str:
        return cast(str, (await self._server.run(command, [session_id], arguments)).decode())


def _session(session_id: str, found: dict[bytes, bytes], moving_ms: int, held_steps: int) -> SharedSession:
    ended = found.get(b"ended")
    reason = None if ended is None else next(each for each in END_REASONS if each == ended.decode())
    over, episode, steps = int(found[b"over"]), int(found[b"episode"]), int(found[b"steps"])
    if reason is None and held_steps != steps:
        raise DamagedEntryError(f"it has {held_steps} steps of {steps}")
    is_marked = b"answered_episode" in found
    return SharedSession(
        about=About.read(found[b"about"], session_id),
        generation=int(found[b"generation"]),
        node=found[b"node"].decode(),
        upstream_id=found[b"upstream_id"].decode(),
        episode=episode,
        steps=steps,
        head=EpisodeStart.read(found[b"head"], session_id, episode),
        over=(bool(over & 1), bool(over & 2)),
        ended=reason,
        moving_s=moving_ms / 1000 if b"holder" in found else None,
        answered=(int(found[b"answered_episode"]), int(found[b"answered_steps"])) if is_marked else (-1, 0),
    )


def _has_none(session_id: str, reason: EndReason) -> bool:
    return False


def _text(content: Any) -> str:
    return content.decode() if isinstance(content, bytes) else ""
