"""A node: a Rollgym server behind a gateway, and the connections to it.

Frames to one node go in one encoding; those of one turn of the event loop go out together. Operations that the node
answers at once (its environment runs inline) share a frame, as a batch. Others have a frame each, so that none waits
for a slower one.
"""

import asyncio
import base64
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.net.connection import Connection, ConnectionLost, Reply
from rollgym.clients.net.pool import Timing
from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.event_loop import Pending
from rollgym.env_server.gateway.upstream.targets import Target

# The node gives up on operations by its own time-outs, and a node that is silent is given up by the connection.
_ANSWER_S = 24 * 3600.0
NODE_KEY_CHARACTERS = 8
_KEY_BYTES = 5
# A node that is away for longer has its sessions rebuilt on another one.
_CONNECT_S = 5.0
_RECONNECT_S = 5.0
_OPERATION_S = 60.0
# A node that owes an answer and is silent for both together is given up.
_SILENCE_S = 5.0
_PONG_S = 10.0
_CLOSE_S = 10.0
# How long the sessions of an unregistered server are remembered, in case it comes back.
_REMEMBERED_S = 3600.0


class NodeOperation(Pending):
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

    @property
    def is_safe_to_repeat(self) -> bool:
        """Whether the node knows it again, and does not do it twice."""
        return True

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

    def __init__(self, caller: ServerCalls) -> None:
        self.caller = caller
        self._pool = caller.pool
        self._loop = asyncio.get_running_loop()
        self._queues: dict[int | None, list[NodeOperation]] = {}
        self._connecting: asyncio.Task[None] | None = None

    def send(self, operation: NodeOperation) -> None:
        """Send an operation at the end of this turn of the loop."""
        if not self._queues:
            self._loop.call_soon(self._flush)
        queue = self._queues.get(operation.process)
        if queue is None:
            queue = self._queues[operation.process] = []
        queue.append(operation)

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
        for process, operations in queues.items():
            connection = self._pool.ready(process)
            if connection is None:
                # Until a restarted process is connected, another process forwards its operations.
                self._connect(process)
                connection = self._pool.ready(None)
            if connection is None:
                for operation in operations:
                    operation.lost(ConnectionLost(f"there is no connection to {self._pool.url}"), sent=False)
                continue
            sharing = [operation for operation in operations if operation.shares_frames]
            if len(sharing) > 1:
                size = self._pool.max_batch
                for first in range(0, len(sharing), size):
                    self._send_batch(connection, sharing[first : first + size])
                operations = [operation for operation in operations if not operation.shares_frames]
            for operation in operations:
                self._send_one(connection, operation)

    def _send_one(self, connection: Connection, operation: NodeOperation) -> None:
        future = self._request(connection, operation.fields)
        if isinstance(future, ProblemError):
            operation.refused(future)
        else:
            future.add_done_callback(partial(_one_answered, operation))

    def _send_batch(self, connection: Connection, operations: Sequence[NodeOperation]) -> None:
        if len(operations) == 1:
            self._send_one(connection, operations[0])
            return
        frame = {"op": "batch", "ops": [operation.fields for operation in operations]}
        future = self._request(connection, frame)
        if isinstance(future, ProblemError):
            # Too large for one frame, or one of them cannot be passed on.
            half = len(operations) // 2
            self._send_batch(connection, operations[:half])
            self._send_batch(connection, operations[half:])
        else:
            future.add_done_callback(partial(self._batch_answered, operations))

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

    def _batch_answered(self, operations: Sequence[NodeOperation], future: "asyncio.Future[Reply]") -> None:
        error = _error_of(future)
        results = None if error is not None else future.result().payload
        if isinstance(error, ProblemError) or (
            error is None and not (isinstance(results, list) and len(results) == len(operations))
        ):
            for operation in operations:
                operation.refused(
                    error or ProblemError("upstream_error", "the batch's answer cannot be read")
                )
            return
        if error is not None:
            for operation in operations:
                operation.lost(error, sent=True)
            return
        assert isinstance(results, list)
        for operation, result in zip(operations, results, strict=True):
            reply = result.get("ok") if type(result) is dict else None
            if reply is not None:
                operation.answered(reply)
            elif type(result) is dict and type(result.get("error")) is dict:
                problem = ProblemError.from_problem(result["error"])
                if problem.code == "too_large" and operation.is_safe_to_repeat:
                    # The retries go together; operations that were done get the same answer.
                    operation.shares_frames = False
                    self.send(operation)
                else:
                    operation.refused(problem)
            else:
                operation.refused(ProblemError("upstream_error", "the batch's answer cannot be read"))

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


def _one_answered(operation: NodeOperation, future: "asyncio.Future[Reply]") -> None:
    error = _error_of(future)
    if error is None:
        operation.answered(future.result().payload)
    elif isinstance(error, ProblemError):
        operation.refused(error)
    else:
        operation.lost(error, sent=True)


def _error_of(future: "asyncio.Future[Reply]") -> Exception | None:
    if future.cancelled():
        return ConnectionLost("the connection was closed")
    error = future.exception()
    if error is None or isinstance(error, Exception):
        return error
    raise error


def _not_passed_on(error: EncodeError) -> ProblemError:
    return ProblemError("invalid_request", f"this call cannot be passed on: it {error}")


def node_key(url: str, owner: str) -> str:
    """The key of a node: the same for every gateway, and after every restart.

    Args:
        url: The node's URL.
        owner: The name of the token that registered it, so that no other owner can act for it.
    """
    digest = hashlib.blake2b(f"{owner} {url}".encode(), digest_size=_KEY_BYTES).digest()
    return base64.b32encode(digest).decode().lower()


class Node:
    """The connections to one node, made when they are needed.

    Args:
        target: The node's address.
        token: Bearer token for it.
        owner: The name of the token that registered it.
        max_reply_bytes: Larger replies are refused.

    Attributes:
        key: Its name in the ids of sessions.
        registrations: How many registrations use it.
        abandoned: Sessions that it may still have, though they moved to another node or were closed.
        released_at: When its last registration ended, on the loop's clock.
        was_compared: Whether its limits were compared with those of the gateway.
    """

    def __init__(self, target: Target, token: str | None, owner: str, max_reply_bytes: int) -> None:
        self.target = target
        self.key = node_key(target.url, owner)
        self.token = token
        self.registrations = 0
        self.abandoned: list[str] = []
        self.released_at = 0.0
        self.was_compared = False
        self._max_reply_bytes = max_reply_bytes
        self._links: dict[bool, Link] = {}
        self._to_close: list[str] = []
        self._closing: set[asyncio.Task[None]] = set()

    def link(self, binary: bool) -> Link:
        """The way to the node in one encoding."""
        link = self._links.get(binary)
        if link is None:
            link = self._links[binary] = Link(self._connect(binary))
        return link

    @property
    def largest_restore(self) -> int:
        """How many bytes it takes to restore a session, as it said when it was connected to."""
        return self.link(True).caller.pool.request_limit("restore")

    def close_session(self, upstream_id: str) -> None:
        """End a session there, together with all others of this turn of the loop."""
        if not self._to_close:
            asyncio.get_running_loop().call_soon(self._close_sessions)
        self._to_close.append(upstream_id)

    def is_there(self) -> None:
        """Note a heartbeat: end the sessions that the node may still have from before it was away."""
        abandoned, self.abandoned = self.abandoned, []
        for upstream_id in abandoned:
            self.close_session(upstream_id)

    async def begin_anew(
        self,
        env_id: str,
        episode: dict[str, Any] | None,
        kwargs: dict[str, Any],
        *,
        idle_timeout_s: float,
        make_timeout_s: float,
    ) -> tuple[str, int]:
        """Make a session there at a point of its own; return its id there, and the I/O process that owns it.

        Args:
            env_id: The environment's id there.
            episode: The portable episode to restore; None before the first one.
            kwargs: What the client set.
            idle_timeout_s: When the node evicts it.
            make_timeout_s: The time-out, in seconds.

        Raises:
            ProblemError: The node refuses, or answers something else than it should.
            ConnectionError: The node cannot be reached.
            TimeoutError: The node does not answer.
        """
        caller = self.link(False).caller
        fields: dict[str, Any] = {
            "lingers": False,
            "idle_timeout_s": idle_timeout_s,
            "request_id": caller.new_request_id(),
        }
        if episode is not None:
            fields |= {"op": "restore", "episode": {**episode, "env_id": env_id}}
        else:
            fields |= {"op": "make", "env_id": env_id, "kwargs": kwargs}
        process = await caller.pool.next_process()
        reply = await caller.call(fields, process, caller.deadline(make_timeout_s))
        if not isinstance(reply.payload, dict) or "session_id" not in reply.payload:
            raise ProblemError("upstream_error", f"the answer to {fields['op']} cannot be read")
        return str(reply.payload["session_id"]), reply.process

    async def release(self) -> None:
        """Note that a registration does not use it any more."""
        self.registrations -= 1
        if self.registrations <= 0:
            self.released_at = asyncio.get_running_loop().time()
            if self._closing:
                await asyncio.wait(self._closing)
            links, self._links = list(self._links.values()), {}
            for link in links:
                link.close()
                await link.caller.pool.close()

    def _connect(self, binary: bool) -> ServerCalls:
        return ServerCalls(
            self.target.url,
            token=self.token,
            binary=binary,
            timing=Timing(_CONNECT_S, _RECONNECT_S, _OPERATION_S, _SILENCE_S, _PONG_S),
            address=self.target.address,
            max_message_bytes=self._max_reply_bytes,
        )

    def _close_sessions(self) -> None:
        upstream_ids, self._to_close = self._to_close, []
        task = asyncio.get_running_loop().create_task(self._close_all(upstream_ids))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_all(self, upstream_ids: list[str]) -> None:
        caller = self.link(True).caller
        fields: dict[str, Any] = {"op": "close", "session_ids": upstream_ids}
        try:
            await caller.call(fields, None, caller.deadline(_CLOSE_S))
        except (ConnectionError, TimeoutError, ProblemError):
            # The close is repeated at its next heartbeat; sessions that it no longer has are not an error there.
            self.abandoned.extend(upstream_ids)


class Nodes:
    """The nodes that servers are registered at; the registrations of one server share one node."""

    def __init__(self, max_reply_bytes: int) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._by_key: dict[str, Node] = {}

    def take(self, target: Target, token: str | None, owner: str) -> Node:
        """The node for one more registration."""
        self._forget()
        before = self._by_key.get(node_key(target.url, owner))
        if before is not None and (before.target, before.token) == (target, token):
            node = before
        else:
            node = Node(target, token, owner, self._max_reply_bytes)
            if before is not None:
                node.abandoned, before.abandoned = before.abandoned, []
            self._by_key[node.key] = node
        node.registrations += 1
        return node

    def find(self, key: str) -> Node | None:
        """The node that ids of sessions call so, if there is one at present."""
        node = self._by_key.get(key)
        return node if node is not None and node.registrations > 0 else None

    def _forget(self) -> None:
        """Drop nodes without registrations, except those that may come back with sessions."""
        remembered = asyncio.get_running_loop().time() - _REMEMBERED_S
        self._by_key = {
            key: node
            for key, node in self._by_key.items()
            if node.registrations > 0 or (node.abandoned and node.released_at > remembered)
        }
