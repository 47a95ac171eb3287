"""The WebSocket: frames in, operations called, answers out."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import LONG, SUBPROTOCOLS, dumps, loads, read_long
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.quotas import ConnectionSlot
from rollgym.env_server.common.event_loop import Pending
from rollgym.env_server.common.io_process import ProcessRank, going_away
from rollgym.env_server.common.negotiation import (
    PROBLEM_MEDIA_TYPE,
    is_portable,
    problem_headers,
    too_large_reply,
    too_large_request,
)
from rollgym.env_server.common.overload import Arrivals, QueueDelay
from rollgym.env_server.common.requests import FrameId, as_problem, bad_frame, frame_id, invalid, sendable
from rollgym.env_server.http.batch import Results, Unfinished, encode_results, read_batch, run_batch
from rollgym.env_server.http.transport.write_coalescing import ARRIVALS, AWAITS_TOKEN, MORE, TRUSTED
from rollgym.env_server.operations.operations import SOCKET_OPS, unknown_op
from rollgym.env_server.operations.services import Services
from rollgym.env_server.sessions.replies import Reply

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

POLICY_VIOLATION = 1008
_MAX_AUTH_BYTES = 2**14
_names = itertools.count()


async def serve_socket(
    services: Services, scope: MutableMapping[str, Any], receive: Receive, send: Send
) -> None:
    """Accept one socket and serve it until it drops."""
    await receive()
    try:
        caller = services.tokens.from_headers(Headers(scope=scope))
        if caller is not None:
            caller.require("play")
        slot = services.sockets.enter(caller, scope["client"][0] if scope["client"] else "")
    except ProblemError as problem:
        await reject(services, send, problem)
        return
    traceparent = Headers(scope=scope).get("traceparent")
    try:
        await _serve_accepted(services, slot, scope, receive, send, traceparent)
    finally:
        services.sockets.leave(slot)


async def _serve_accepted(
    services: Services,
    slot: ConnectionSlot,
    scope: MutableMapping[str, Any],
    receive: Receive,
    send: Send,
    traceparent: str | None,
) -> None:
    offered = scope["subprotocols"]
    binary = next((offer == SUBPROTOCOLS[True] for offer in offered if offer in SUBPROTOCOLS.values()), False)
    chosen = SUBPROTOCOLS[binary] if SUBPROTOCOLS[binary] in offered else None
    trusted = {AWAITS_TOKEN: True} if slot.caller is None else {TRUSTED: services.settings.max_restore_bytes}
    await send({"type": "websocket.accept", "subprotocol": chosen, **trusted})
    services.metrics.sockets += 1
    services.metrics.sockets_opened += 1
    try:
        if slot.caller is None:
            await _identify(services, slot, receive, send, binary=binary)
        if slot.caller is not None:
            arrivals = scope.get("extensions", {}).get(ARRIVALS)
            socket = Socket(
                services, slot, receive, send, binary=binary, traceparent=traceparent, arrivals=arrivals
            )
            await socket.serve()
    except OSError:
        # uvicorn says in this way that the client went away while an answer was being sent.
        pass
    finally:
        services.metrics.sockets -= 1


def name_socket(rank: ProcessRank) -> str:
    """A name for a new socket, which no other of this server has; it begins with the index of its process."""
    return f"{rank.index}.{next(_names)}"


async def close_revoked(send: Send) -> None:
    """End a socket whose token was revoked; a client that has disconnected receives nothing."""
    with contextlib.suppress(OSError):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "unauthorized"})


async def reject(services: Services, send: Send, problem: ProblemError) -> None:
    """Answer a handshake with a problem."""
    services.metrics.problems[problem.code] += 1
    body = dumps(problem.to_problem(), binary=False)
    headers = [(b"content-type", PROBLEM_MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem_headers(problem).items()]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def _identify(
    services: Services, slot: ConnectionSlot, receive: Receive, send: Send, *, binary: bool
) -> None:
    """Note who the first frame says that this is; anything else than a good token ends the socket."""
    frame: Any = None
    try:
        async with asyncio.timeout(services.settings.auth_timeout_s):
            message = await receive()
        if message["type"] != "websocket.receive":
            return
        content = message.get("text") or message.get("bytes") or b""
        if len(content) > _MAX_AUTH_BYTES:
            # Parsing megabytes would block other clients, and this client has not authenticated yet.
            raise ProblemError(
                "unauthorized", f"a first frame with a token has at most {_MAX_AUTH_BYTES} bytes"
            )
        frame = loads(content, binary=binary)
        if type(frame) is not dict or frame.get("op") != "auth":
            raise ProblemError(
                "unauthorized", "this server needs a token: a header, or a first frame with op 'auth'"
            )
        token = frame.get("token")
        if type(token) is not str:
            raise ProblemError("unauthorized", "the first frame holds no token")
        caller = services.tokens.caller(token)
        caller.require("play")
        services.sockets.identify(slot, caller)
    except (ProblemError, DecodeError, TimeoutError) as error:
        problem = error if isinstance(error, ProblemError) else ProblemError("unauthorized", "no token came")
        services.metrics.problems[problem.code] += 1
        content = dumps({"id": frame_id(frame), "error": problem.to_problem()}, binary=binary)
        await send(_message(content, binary))
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": problem.code})
        return
    trusted = {TRUSTED: services.settings.max_restore_bytes}
    await send(_message(dumps({"id": frame_id(frame), "ok": {}}, binary=binary), binary) | trusted)


def _message(content: bytes, binary: bool) -> dict[str, Any]:
    if binary:
        return {"type": "websocket.send", "bytes": content}
    return {"type": "websocket.send", "text": content.decode()}


class Socket:
    """One open socket of one caller."""

    def __init__(
        self,
        services: Services,
        slot: ConnectionSlot,
        receive: Receive,
        send: Send,
        *,
        binary: bool,
        traceparent: str | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        assert slot.caller is not None
        self._services = services
        self._slot = slot
        self._call = services.operations.call
        self._metrics = services.metrics
        self._problems = services.metrics.problems
        self._receive = receive
        self._send = send
        self._binary = binary
        self._request_limit = services.settings.max_request_bytes
        self._request_limit_of = services.settings.request_limit
        self._reply_limit = services.settings.max_reply_bytes
        self._portable_limit = services.settings.max_portable_bytes
        self._max_batch = services.settings.max_batch
        self._max_in_flight = services.settings.max_in_flight
        self._overload = services.overload
        if arrivals is None:
            # Another server than ours has the connection, and does not say when frames came.
            arrivals = Arrivals(int)
            arrivals.since = math.inf
        arrivals.follow(services.overload)
        self._arrivals = arrivals
        self._delay = QueueDelay(services.overload.limit_s)
        name = name_socket(services.rank)
        self._context = Context(slot.caller, binary=binary, socket=name, traceparent=traceparent)
        self._in_flight: set[FrameId] = set()
        self._dropped = False
        self._room: asyncio.Future[None] | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._passed_on: set[FrameId] = set()
        self._answers: list[bytes] = []

    async def serve(self) -> None:
        """Answer frames until the socket drops. Operations that run then are finished all the same."""
        receive, send, binary, slot = self._receive, self._send, self._binary, self._slot
        arrivals, in_flight, most = self._arrivals, self._in_flight, self._max_in_flight
        late_s, was_late, admissions = self._overload.late_s, False, self._services.admissions
        slot.on_change = self._changed
        self._services.unanswered.attend(self._give_up)
        try:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive" or slot.revoked:
                    return
                text = message.get("text")
                if not admissions.are_open():
                    # Frames that are here already are received, and their answers sent, without the loop's going on.
                    await admissions.turn()
                taken = admissions.admitted_at
                waited = taken - arrivals.since
                if waited >= late_s or was_late or len(in_flight) >= most:
                    self._look_at_delay(waited, taken)
                    was_late = waited >= late_s or bool(self._context.waited_s)
                content = self._take(message["bytes"] if text is None else text)
                while (beginning := self._beginning) is not None:
                    self._beginning = None
                    await asyncio.wait((beginning,))
                if content is not None:
                    self._metrics.socket_sent += len(content)
                    await send(_message(content, binary))
                elif len(in_flight) >= most:
                    await self._wait_for_room()
        finally:
            slot.on_change = None
            self._services.unanswered.dismiss(self._give_up)
            self._dropped = True
            self._services.socket_dropped(self._context)

    def _look_at_delay(self, waited: float, now: float) -> None:
        """Note whether the frame that is taken now has waited for too long, for the loop or for others' answers."""
        overload = self._overload
        is_refused = self._delay.is_late(waited, now) or (overload.is_behind and waited >= overload.late_s)
        if waited >= overload.late_s:
            is_refused = overload.is_queue(self._arrivals.waiting()) and is_refused
        if len(self._in_flight) >= self._max_in_flight:
            self._context.waited_s = max(waited, overload.limit_s)
        else:
            self._context.waited_s = waited if is_refused else 0.0

    async def _wait_for_room(self) -> None:
        """Wait until a frame is answered: back-pressure for a client that sends faster than it is answered.

        After a while further frames are read all the same, and refused. Few are accepted, but without the wait their
        number would be unbounded.
        """
        self._room = asyncio.get_running_loop().create_future()
        patience_s = self._overload.limit_s if len(self._in_flight) < 2 * self._max_in_flight else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._room
        self._room = None

    def _changed(self) -> None:
        """Handle the revocation or the change of the token."""
        if not self._slot.revoked:
            assert self._slot.caller is not None
            self._context.caller = self._slot.caller
            return
        self._services.unanswered.add(asyncio.get_running_loop().create_task(close_revoked(self._send)))

    def _take(self, data: str | bytes) -> bytes | None:
        """Read and handle one frame; the answer, if it is ready at once."""
        # An ASCII text has as many bytes as characters, and `isascii` costs nothing.
        self._metrics.socket_received += (
            len(data) if isinstance(data, bytes) or data.isascii() else len(data.encode())
        )
        if len(data) > LONG:
            self._begin(self._take_long(data))
            return None
        try:
            frame = loads(data, binary=self._binary)
        except DecodeError as error:
            return self._encode_problem(None, invalid("", str(error)))
        return self._handle(frame, data)

    async def _take_long(self, data: str | bytes) -> None:
        """Read and handle a frame that takes long to be read; no other is read before that is done."""
        try:
            frame = await read_long(data.encode() if isinstance(data, str) else data, binary=self._binary)
        except DecodeError as error:
            content: bytes | None = self._encode_problem(None, invalid("", str(error)))
        else:
            content = self._handle(frame, data)
        if content is not None:
            self._metrics.socket_sent += len(content)
            # A client that has disconnected receives nothing.
            with contextlib.suppress(OSError):
                await self._send(_message(content, self._binary))

    def _handle(self, frame: Any, data: str | bytes) -> bytes | None:
        """Handle the contents of one frame; return the answer, if it is ready at once."""
        number: FrameId = None
        try:
            number = frame_id(frame)
            if 4 * len(data) > self._request_limit:
                self._check_size(data, frame)
            if number is None:
                raise bad_frame(frame)
            if number in self._in_flight:
                raise invalid("id", f"the id {number!r} is in use")
            op = frame.get("op")
            reply: Reply | Results | Pending | Unfinished | Awaitable[Reply | Results]
            if op == "batch":
                reply = run_batch(
                    self._services.operations, self._context, read_batch(frame, self._max_batch)
                )
            elif type(op) is str and op in SOCKET_OPS:
                reply = self._call(self._context, op, frame)
            elif op == "auth":
                reply = self._authenticate_again(frame)
            else:
                raise unknown_op(op)
            if isinstance(reply, (dict, list)):
                return self._encode(number, reply)
            self._in_flight.add(number)
            if isinstance(reply, Pending):
                self._passed_on.add(number)
                reply.listen(self._take_answer, number)
                return None
            if isinstance(reply, Unfinished):
                reply = self._begun(reply)
            self._services.unanswered.add(asyncio.get_running_loop().create_task(self._finish(number, reply)))
        except DecodeError as error:
            return self._encode_problem(number, invalid("", str(error)))
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this frame, not the socket
            return self._encode_problem(number, as_problem(error))
        return None

    def _begun(self, batch: Unfinished) -> Awaitable[Results]:
        """The results of a batch that is begun in slices; no frame is read before that is done."""
        beginning = self._begin(batch.begin())

        async def results() -> Results:
            await beginning
            return await batch.results()

        return results()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work that must end before the next frame is read."""
        self._beginning = asyncio.get_running_loop().create_task(work)
        self._services.unanswered.add(self._beginning)
        return self._beginning

    def _authenticate_again(self, frame: dict[str, Any]) -> Reply:
        """Check a token sent on an authenticated socket; a wrong token, or one of another caller, is an error."""
        token = frame.get("token")
        if type(token) is not str:
            raise invalid("token", "a token is needed, as text")
        if not self._services.tokens.required:
            return {}
        if self._services.tokens.caller(token).name != self._context.caller.name:
            raise ProblemError("forbidden", "this socket is another token's; open one of your own")
        return {}

    def _check_size(self, data: str | bytes, frame: Any) -> None:
        size = len(data.encode()) if isinstance(data, str) else len(data)
        if size > self._request_limit:
            op = frame.get("op") if type(frame) is dict else None
            limit = self._request_limit_of(op) if type(op) is str else self._request_limit
            if size > limit:
                raise too_large_request(size, limit)

    async def _finish(self, number: FrameId, reply: Awaitable[Reply | Results]) -> None:
        """Answer a frame when its operation is done."""
        try:
            content = self._encode(number, await reply)
        except asyncio.CancelledError:
            # The server is shutting down and stops waiting for this answer; the client still gets a problem.
            content = self._encode_problem(number, going_away())
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this frame, not the socket
            content = self._encode_problem(number, as_problem(error))
        self._metrics.socket_sent += len(content)
        try:
            await self._send(_message(content, self._binary))
        except OSError:
            # The client has disconnected; it may retry on another socket.
            return
        finally:
            # Only now: an answer that a client does not read counts as one that it still waits for.
            self._forget(number)

    def _take_answer(self, number: FrameId, answer: Reply | Results | ProblemError) -> None:
        """Answer a frame with another server's answer; the answers of one turn of the loop share a task."""
        if number not in self._passed_on:
            # It was given up.
            return
        self._passed_on.discard(number)
        try:
            if isinstance(answer, ProblemError):
                raise answer
            content = self._encode(number, answer)
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this frame, not the socket
            content = self._encode_problem(number, as_problem(error))
        self._metrics.socket_sent += len(content)
        self._forget(number)
        if not self._answers:
            self._services.unanswered.add(asyncio.get_running_loop().create_task(self._send_answers()))
        self._answers.append(content)

    def _give_up(self) -> None:
        """Answer the calls that wait for other servers with the problem that this server is shutting down."""
        for number in list(self._passed_on):
            self._take_answer(number, going_away())

    async def _send_answers(self) -> None:
        answers, self._answers = self._answers, []
        try:
            for content in answers[:-1]:
                await self._send({**_message(content, self._binary), MORE: True})
            await self._send(_message(answers[-1], self._binary))
        except OSError:
            # The client has disconnected; it may retry on another socket.
            return

    def _forget(self, number: FrameId) -> None:
        """Note that a frame is answered."""
        self._in_flight.discard(number)
        if self._dropped and not self._in_flight:
            # Operations that ran when the socket dropped may have made or used sessions since.
            self._services.socket_dropped(self._context)
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def _encode(self, number: FrameId, reply: Reply | Results) -> bytes:
        if isinstance(reply, list):
            for result in reply:
                if "error" in result:
                    self._problems[result["error"]["code"]] += 1
            return encode_results(
                number, reply, self._reply_limit, binary=self._binary, take_back=self._take_back
            )
        try:
            content = dumps({"id": number, "ok": reply}, binary=self._binary)
        except EncodeError:
            self._take_back(reply)
            raise
        size = len(content)
        if size > self._reply_limit and not is_portable(reply, size, self._portable_limit):
            raise too_large_reply(len(content), self._reply_limit, self._take_back(reply))
        return content

    def _take_back(self, reply: Reply) -> int:
        return self._services.operations.take_back(self._context, reply)

    def _encode_problem(self, number: FrameId, problem: ProblemError) -> bytes:
        self._problems[problem.code] += 1
        return dumps({"id": number, "error": sendable(problem, binary=self._binary)}, binary=self._binary)
