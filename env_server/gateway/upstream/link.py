"""Frames to one node in one encoding; those of one turn of the event loop go out together.

Operations that the node answers at once (its environment runs inline) share a frame, as a batch. Others have a frame
each, so that none waits for a slower one.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollgym.clients.net.caller import Caller
from rollgym.clients.net.connection import Connection, Reply
from rollgym.clients.net.transport import ConnectionLost
from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.event_loop import Pending

# The node gives up on operations by its own time-outs, and a node that is silent is given up by the connection.
_ANSWER_S = 24 * 3600.0


class Passage(Pending):
    """One operation in flight to a node.

    Attributes:
        fields: The frame for the node, without an id.
        process: The I/O process of the node to ask.
        shares_frames: Whether the node answers at once.
    """

    __slots__ = ("fields", "process", "shares_frames")

    def __init__(self, fields: dict[str, Any], process: int | None, shares_frames: bool) -> None:
        super().__init__()
        self.fields = fields
        self.process = process
        self.shares_frames = shares_frames

    @abstractmethod
    def answered(self, reply: Any) -> None:
        """Handle the answer of the node."""

    @abstractmethod
    def refused(self, problem: ProblemError) -> None:
        """Handle the problem that the node answered."""

    @abstractmethod
    def lost(self, error: Exception, *, sent: bool) -> None:
        """Note that no answer will come; whether an operation that was sent was done is not known."""


class Link:
    """The way to one node in one encoding.

    Args:
        caller: Its connections.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._pool = caller.pool
        self._loop = asyncio.get_running_loop()
        self._queues: dict[int | None, list[Passage]] = {}
        self._connecting: asyncio.Task[None] | None = None

    def send(self, passage: Passage) -> None:
        """Send an operation at the end of this turn of the loop."""
        if not self._queues:
            self._loop.call_soon(self._flush)
        queue = self._queues.get(passage.process)
        if queue is None:
            queue = self._queues[passage.process] = []
        queue.append(passage)

    async def ask(self, fields: dict[str, Any], process: int | None) -> Any:
        """Send at once, over an open connection.

        Raises:
            ProblemError: The node's problem.
            ConnectionError: No connection is open, or it breaks.
        """
        connection = self._pool.ready(process) or self._pool.ready(None)
        if connection is None:
            raise ConnectionLost(f"there is no connection to {self._pool.url}")
        deadline = self._loop.time() + _ANSWER_S
        try:
            reply = await connection.request(fields, deadline, self._pool.max_request_bytes)
        except EncodeError as error:
            raise _not_passed_on(error) from error
        return reply.payload

    def close(self) -> None:
        """Cancel the connection attempt that is under way."""
        if self._connecting is not None:
            self._connecting.cancel()

    def _flush(self) -> None:
        queues, self._queues = self._queues, {}
        for process, passages in queues.items():
            connection = self._pool.ready(process)
            if connection is None:
                # Until a restarted process is connected, another process forwards its operations.
                self._connect(process)
                connection = self._pool.ready(None)
            if connection is None:
                for passage in passages:
                    passage.lost(ConnectionLost(f"there is no connection to {self._pool.url}"), sent=False)
                continue
            sharing = [passage for passage in passages if passage.shares_frames]
            if len(sharing) > 1:
                size = self._pool.max_batch
                for first in range(0, len(sharing), size):
                    self._send_batch(connection, sharing[first : first + size])
                passages = [passage for passage in passages if not passage.shares_frames]
            for passage in passages:
                self._send_one(connection, passage)

    def _send_one(self, connection: Connection, passage: Passage) -> None:
        future = self._request(connection, passage.fields)
        if isinstance(future, ProblemError):
            passage.refused(future)
        else:
            future.add_done_callback(partial(_one_answered, passage))

    def _send_batch(self, connection: Connection, passages: Sequence[Passage]) -> None:
        if len(passages) == 1:
            self._send_one(connection, passages[0])
            return
        frame = {"op": "batch", "ops": [passage.fields for passage in passages]}
        future = self._request(connection, frame)
        if isinstance(future, ProblemError):
            # Too large for one frame, or one of them cannot be passed on.
            half = len(passages) // 2
            self._send_batch(connection, passages[:half])
            self._send_batch(connection, passages[half:])
        else:
            future.add_done_callback(partial(self._batch_answered, passages))

    def _request(
        self, connection: Connection, frame: dict[str, Any]
    ) -> "asyncio.Future[Reply] | ProblemError":
        deadline = self._loop.time() + _ANSWER_S
        try:
            return connection.request(frame, deadline, self._pool.max_request_bytes)
        except ProblemError as problem:
            return problem
        except EncodeError as error:
            return _not_passed_on(error)
        except ConnectionLost as error:
            failed: asyncio.Future[Reply] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    def _batch_answered(self, passages: Sequence[Passage], future: "asyncio.Future[Reply]") -> None:
        error = _error_of(future)
        results = None if error is not None else future.result().payload
        if isinstance(error, ProblemError) or (
            error is None and not (isinstance(results, list) and len(results) == len(passages))
        ):
            for passage in passages:
                passage.refused(error or ProblemError("upstream_error", "the batch's answer cannot be read"))
            return
        if error is not None:
            for passage in passages:
                passage.lost(error, sent=True)
            return
        assert isinstance(results, list)
        for passage, result in zip(passages, results, strict=True):
            reply = result.get("ok") if type(result) is dict else None
            if reply is not None:
                passage.answered(reply)
            elif type(result) is dict and type(result.get("error")) is dict:
                problem = ProblemError.from_problem(result["error"])
                if problem.code == "too_large":
                    # The retries go together; operations that were done get the same answer.
                    passage.shares_frames = False
                    self.send(passage)
                else:
                    passage.refused(problem)
            else:
                passage.refused(ProblemError("upstream_error", "the batch's answer cannot be read"))

    def _connect(self, process: int | None) -> None:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._try_to_connect(process))

    async def _try_to_connect(self, process: int | None) -> None:
        try:
            await self._pool.connection(process)
        except (ConnectionError, ProblemError):
            # Who needs the connection finds out by itself.
            return
        finally:
            self._connecting = None


def _one_answered(passage: Passage, future: "asyncio.Future[Reply]") -> None:
    error = _error_of(future)
    if error is None:
        passage.answered(future.result().payload)
    elif isinstance(error, ProblemError):
        passage.refused(error)
    else:
        passage.lost(error, sent=True)


def _error_of(future: "asyncio.Future[Reply]") -> Exception | None:
    if future.cancelled():
        return ConnectionLost("the connection was closed")
    error = future.exception()
    if error is None or isinstance(error, Exception):
        return error
    raise error


def _not_passed_on(error: EncodeError) -> ProblemError:
    return ProblemError("invalid_request", f"this call cannot be passed on: it {error}")
