"""Calls between the I/O processes of one server, over Unix sockets in a shared directory.

A process calls the others for the sessions that they own. A request and its retries are answered by one process,
whichever process receives them.
"""

import asyncio
import contextlib
import mmap
import os
import struct
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgpack

from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.quotas import map_shared
from rollgym.env_server.common.event_loop import is_given_up
from rollgym.env_server.common.io_process import ProcessRank, Reason, going_away
from rollgym.env_server.common.requests import as_problem, sendable
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.journal_entries import not_known
from rollgym.env_server.sessions.replies import Reply

Handler = Callable[[Mapping[str, Any], str, dict[str, Any], bool], Awaitable[Any]]
"""Answers a call: from whom it is, the operation, its fields, and whether values are for MessagePack."""

_AWAY_S = 15.0
# A call that takes the other process down each time must not do so for ever.
_TRIES = 3
# The number of a connection's first message; questions count from one.
_GREETING = 0
_RETRY_AFTER_S = 2
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
_GATHER_S = 5.0
_MAX_MESSAGE = 1024**3
# The kernel's limit for the path of a Unix socket.
_MAX_PATH = 104
# Callers that ask for readiness do not wait for long.
_READY_WITHIN_S = 0.5
_SLOT = struct.Struct("<Q")
_SLOTS = 1 << 16
_INDEX_BITS = 16
_FILE = "affinity"


class _LinkLost(Exception):  # noqa: N818 - never leaves this module
    """The other process went away before it answered.

    Args:
        sent: Whether it may have received the question.
    """

    def __init__(self, *, sent: bool) -> None:
        super().__init__()
        self.sent = sent


class _Link(asyncio.Protocol):
    """One connection between two processes; messages are MessagePack, end to end.

    Args:
        take: Called with each message that comes in.
        lost: Called when the connection has closed.
    """

    def __init__(self, take: "Callable[[_Link, Any], None]", lost: "Callable[[_Link], None]") -> None:
        self._take = take
        self._lost = lost
        self._unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=_MAX_MESSAGE)
        self._transport: asyncio.WriteTransport | None = None
        self.peer: int | None = None
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of a new connection."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and deliver the messages."""
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._take(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the calls that wait for answers."""
        self._transport = None
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(_LinkLost(sent=True))
        self.answers.clear()
        self._lost(self)

    def send(self, message: Any) -> None:
        """Send a message, unless the connection has closed."""
        if self._transport is not None:
            self._transport.write(dumps(message, binary=True))

    async def ask(self, *question: Any) -> Any:
        """Send a question, and wait for its answer.

        Raises:
            _LinkLost: The other process went away.
        """
        self._number += 1
        return await self._answer(self._number, *question)

    async def greet(self, index: int) -> None:
        """Send this process's index, and wait until the other process acknowledges it.

        A process that is ending may still accept connections that it will never read.

        Raises:
            _LinkLost: The other process closed the connection.
        """
        try:
            await self._answer(_GREETING, index)
        except asyncio.CancelledError:
            self.close()
            raise

    async def _answer(self, number: int, *message: Any) -> Any:
        if self._transport is None:
            raise _LinkLost(sent=False)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send((number, *message))
            return await answer
        finally:
            self.answers.pop(number, None)

    def close(self) -> None:
        """Close the connection to the process."""
        if self._transport is not None:
            self._transport.close()


class Forwarder:
    """Passes calls to the process that owns a session, and answers those of the others.

    Args:
        directory: The directory of the processes' sockets.
        index: The index of this process.
        processes: The number of processes.
    """

    def __init__(self, directory: Path, index: int, processes: int) -> None:
        self._directory = directory
        self._index = index
        self._processes = processes
        self._connecting: dict[int, asyncio.Task[_Link]] = {}
        self._incoming: set[_Link] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._handler: Handler | None = None
        self._peer_lost: Callable[[int], None] | None = None

    async def start(self, handler: Handler, peer_lost: Callable[[int], None]) -> None:
        """Answer the others' calls.

        Args:
            handler: Answers a call, or raises `ProblemError`.
            peer_lost: Called with the index of a process that has ended.

        Raises:
            ConfigurationError: If the directory cannot be used.
        """
        self._handler = handler
        self._peer_lost = peer_lost
        path = self._path(self._index)
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigurationError(f"the state directory has too long a path for a Unix socket: {path}")
        path.unlink(missing_ok=True)
        # Created under another name, so that no process finds it before its permissions are set.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Link(self._question, self._incoming_lost), str(path.with_suffix(".new"))
        )
        path.with_suffix(".new").chmod(0o600)
        path.with_suffix(".new").rename(path)

    async def call(
        self, index: int, caller: Mapping[str, Any], op: str, fields: Mapping[str, Any], binary: bool
    ) -> Any:
        """Call an operation in another process; wait for one that is restarting.

        Raises:
            ProblemError: The problem that it answers, `draining` if it does not come back, or `upstream_error` if it
                may already have run an operation that must not run twice.
        """
        loop = asyncio.get_running_loop()
        for _ in range(_TRIES):
            link = await self._link(index, loop.time() + _AWAY_S)
            try:
                is_problem, answer = await link.ask(caller, op, fields, binary)
            except EncodeError as error:
                # Some JSON values, such as very deeply nested lists, do not fit MessagePack.
                raise ProblemError("invalid_request", f"this call cannot be passed on: {error}") from error
            except _LinkLost as lost:
                self._forget(index, link)
                if lost.sent and op == "step" and fields.get("step") is None:
                    raise not_known(_away(index).detail) from lost
                continue
            if is_problem:
                raise ProblemError.from_problem(answer)
            return answer
        raise _away(index)

    async def gather(
        self,
        caller: Mapping[str, Any],
        op: str,
        fields: Mapping[str, Any],
        binary: bool,
        timeout_s: float = _GATHER_S,
    ) -> list[Any]:
        """Call an operation in all other processes; those that do not answer in time are left out."""

        async def ask(index: int) -> Any:
            async with asyncio.timeout(timeout_s):
                return await self.call(index, caller, op, fields, binary)

        others = (index for index in range(self._processes) if index != self._index)
        answers = await asyncio.gather(*map(ask, others), return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, ProblemError | TimeoutError):
                    raise answer
            else:
                found.append(answer)
        return found

    async def close(self) -> None:
        """Answer no more, and end all connections."""
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)
        for link in list(self._incoming):
            link.close()
        for connecting in self._connecting.values():
            if connecting.done() and connecting.exception() is None:
                connecting.result().close()
            else:
                connecting.cancel()
        for task in self._running:
            task.cancel()

    # -- connections ---------------------------------------------------------------------------------------------

    def _path(self, index: int) -> Path:
        return self._directory / f"io-{index}.sock"

    async def _link(self, index: int, deadline: float) -> _Link:
        """The connection to a process; calls that come at one time share it."""
        connecting = self._connecting.get(index)
        if connecting is None:
            connecting = asyncio.get_running_loop().create_task(self._connect(index, deadline))
            self._connecting[index] = connecting
        try:
            return await asyncio.shield(connecting)
        except TimeoutError:
            if self._connecting.get(index) is connecting:
                del self._connecting[index]
            raise _away(index) from None
        except asyncio.CancelledError:
            if is_given_up():
                raise
            # This process is ending, and opens no more connections.
            raise going_away() from None

    async def _connect(self, index: int, deadline: float) -> _Link:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        async with asyncio.timeout_at(deadline):
            while True:
                # The process is away, and its supervisor starts it again; or this one has no descriptor left.
                with contextlib.suppress(OSError, _LinkLost):
                    link = _Link(_take_answer, self._outgoing_lost)
                    link.peer = index
                    await loop.create_unix_connection(partial(_same, link), str(self._path(index)))
                    await link.greet(self._index)
                    return link
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)

    def _outgoing_lost(self, link: _Link) -> None:
        assert link.peer is not None
        self._forget(link.peer, link)

    def _forget(self, index: int, link: _Link) -> None:
        """Let the next call open a new connection; otherwise every later call would reuse the lost one."""
        connecting = self._connecting.get(index)
        if connecting is None or not connecting.done() or connecting.cancelled():
            return
        if connecting.exception() is not None or connecting.result() is link:
            del self._connecting[index]

    def _incoming_lost(self, link: _Link) -> None:
        self._incoming.discard(link)
        if link.peer is not None and self._peer_lost is not None:
            self._peer_lost(link.peer)

    # -- the others' calls ---------------------------------------------------------------------------------------

    def _question(self, link: _Link, message: Any) -> None:
        number, *question = message
        if number == _GREETING:
            link.peer = question[0]
            self._incoming.add(link)
            link.send((_GREETING, False, None))
            return
        task = asyncio.get_running_loop().create_task(self._answer(link, number, *question))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(
        self,
        link: _Link,
        number: int,
        caller: Mapping[str, Any],
        op: str,
        fields: dict[str, Any],
        binary: bool,
    ) -> None:
        assert self._handler is not None
        try:
            answer = (number, False, await self._handler(caller, op, fields, binary))
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this call, not the process
            answer = (number, True, sendable(as_problem(error), binary=True))
        try:
            link.send(answer)
        except EncodeError as error:
            link.send((number, True, as_problem(error).to_problem()))


def _same(link: _Link) -> _Link:
    return link


def _take_answer(link: _Link, message: Any) -> None:
    number, is_problem, answer = message
    future = link.answers.get(number)
    if future is not None and not future.done():
        future.set_result((is_problem, answer))


def _away(index: int) -> ProblemError:
    return ProblemError("draining", f"I/O process {index} of this server is away", retry_after=_RETRY_AFTER_S)


class Peers:
    """Calls operations in the process that owns a session, or in all processes.

    A call that came from a peer is not forwarded again.

    Args:
        rank: Which process this is; a single one has no peers.
    """

    def __init__(self, rank: ProcessRank) -> None:
        self._rank = rank
        self._forwarder: Forwarder | None = None
        if rank.processes > 1 and rank.directory is not None:
            self._forwarder = Forwarder(rank.directory, rank.index, rank.processes)

    async def start(self, handler: Handler, peer_lost: Callable[[int], None]) -> None:
        """Answer the others' calls, as `Forwarder.start` says.

        Raises:
            ConfigurationError: If the directory cannot be used.
        """
        if self._forwarder is not None:
            await self._forwarder.start(handler, peer_lost)

    async def close(self) -> None:
        """Close the connections to the others."""
        if self._forwarder is not None:
            await self._forwarder.close()

    def is_elsewhere(self, index: int) -> bool:
        """Whether an index is that of another process."""
        return index != self._rank.index

    async def call(self, context: Context, index: int, op: str, fields: Mapping[str, Any]) -> Reply:
        """Call an operation in another process.

        Raises:
            ProblemError: The problem that it answers there, `draining` while the process is away, or `upstream_error`
                if it may have run a step without an index.
        """
        if self._forwarder is None or context.forwarded:
            raise RuntimeError(f"process {index} is not a peer of process {self._rank.index}")
        context.remote.add(index)
        reply: Reply = await self._forwarder.call(index, context.identity(), op, fields, context.binary)
        return reply

    async def gather(self, context: Context, op: str, fields: Mapping[str, Any]) -> list[Reply]:
        """Call an operation in all other processes; those that do not answer are left out."""
        if self._forwarder is None or context.forwarded:
            return []
        return await self._forwarder.gather(context.identity(), op, fields, context.binary)

    async def gather_all(self, context: Context, op: str, fields: Mapping[str, Any]) -> list[Reply]:
        """Call an operation in all other processes.

        Raises:
            ProblemError: `draining`, if one does not answer.
        """
        replies = await self.gather(context, op, fields)
        if not context.forwarded and len(replies) < self._rank.processes - 1:
            raise ProblemError(
                "draining", "an I/O process of this server does not answer", retry_after=_RETRY_AFTER_S
            )
        return replies

    async def readiness(self) -> list[Reason]:
        """Why other processes are not ready; one that does not answer at once is not."""
        if self._forwarder is None:
            return []
        replies = await self._forwarder.gather({}, "ready", {}, False, _READY_WITHIN_S)
        answered = {reply["process"] for reply in replies} | {self._rank.index}
        found = [Reason(*reason) for reply in replies for reason in reply["reasons"]]
        for index in range(self._rank.processes):
            if index not in answered:
                found.append(Reason("process_away", f"I/O process {index} does not answer", index))
        return found

    async def socket_dropped(self, context: Context) -> None:
        """Notify the processes that received forwarded calls of a socket that it has closed."""
        if self._forwarder is None:
            return
        for index in context.remote:
            # A process that is away knows it: its connections to this process have closed, too.
            with contextlib.suppress(ProblemError):
                await self._forwarder.call(index, context.identity(), "socket_dropped", {}, False)


class RequestAffinity:
    """The process that each of the last requests was first sent to, by caller, operation and request id.

    A client that lost its connection retries its request over a new one, which may reach another process. With several
    processes, a table in a small file that all of them map says which one has the answer. Each request has one slot and
    overwrites the request that had it before; a forgotten request is carried out again. No lock is needed, because a
    slot is one word. Two requests with equal hashes are answered by one process, which tells them apart.

    Args:
        rank: Which process this is.
    """

    def __init__(self, rank: ProcessRank) -> None:
        self._rank = rank
        self._slots: mmap.mmap | None = None
        if rank.processes > 1:
            if rank.directory is None:
                raise ValueError("several processes need a directory where they meet")
            self._slots = map_shared(rank.directory / _FILE, _SLOTS * _SLOT.size)

    def elsewhere(self, caller: str, op: str, request_id: str) -> int | None:
        """The other process that answers a request; None for this one, which also takes requests without a process."""
        if self._slots is None:
            return None
        digest = blake2b("\0".join((caller, op, request_id)).encode(), digest_size=_SLOT.size).digest()
        (number,) = _SLOT.unpack(digest)
        offset = number % _SLOTS * _SLOT.size
        mark = number >> _INDEX_BITS
        (held,) = _SLOT.unpack_from(self._slots, offset)
        # Indices count from 1 here, so that 0 marks an empty slot.
        index = held % (1 << _INDEX_BITS) - 1
        if held >> _INDEX_BITS == mark and 0 <= index < self._rank.processes:
            return None if index == self._rank.index else int(index)
        _SLOT.pack_into(self._slots, offset, mark << _INDEX_BITS | self._rank.index + 1)
        return None

    def close(self) -> None:
        """Unmap and close the file."""
        if self._slots is not None:
            self._slots.close()
