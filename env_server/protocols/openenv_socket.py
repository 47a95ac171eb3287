"""OpenEnv's socket: one socket is one session, and the session ends with it."""

import asyncio
import contextlib
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.open_sockets import ConnectionSlot
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.http.socket import Receive, Send, close_revoked, name_socket, reject
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.messages.negotiation import too_large_reply, too_large_request
from rollgym.env_server.messages.validation import invalid, validate
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.openenv_forms import (
    OpenEnvAction,
    OpenEnvResetRequest,
    error_payload,
    observation_payload,
    state_payload,
    wire_error,
)
from rollgym.env_server.protocols.operating import operate
from rollgym.env_server.sessions.replies import Reply


async def serve_openenv_socket(
    services: Services, env_id: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
) -> None:
    """Accept one socket of OpenEnv's and serve it until it drops."""
    await receive()
    try:
        caller = services.tokens.from_headers(Headers(scope=scope))
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token, in the Authorization header")
        caller.require("play")
        context = Context(caller, binary=False, socket=name_socket(services.rank))
        await operate(services.operations, context, "envs", {"env_id": env_id})
        slot = services.sockets.enter(caller, scope["client"][0] if scope["client"] else "")
    except ProblemError as problem:
        await reject(services, send, problem)
        return
    services.metrics.sockets += 1
    try:
        await send({"type": "websocket.accept"})
        await OpenEnvSocket(services, env_id, slot, context, receive, send).serve()
    except OSError:
        # uvicorn says in this way that the client went away while an answer was being sent.
        pass
    finally:
        services.metrics.sockets -= 1
        services.sockets.leave(slot)


class OpenEnvSocket:
    """One open socket, and its session.

    Messages have no ids, so they are answered in their order. While one is, the socket is read on: a client that goes
    away takes its session along at once, whatever runs on it.
    """

    def __init__(
        self,
        services: Services,
        env_id: str,
        slot: ConnectionSlot,
        context: Context,
        receive: Receive,
        send: Send,
    ) -> None:
        self._services = services
        self._env_id = env_id
        self._slot = slot
        self._context = context
        self._receive = receive
        self._send = send
        self._session: Reply = {}
        self._kwargs: dict[str, Any] = {}
        self._episode_id: str | None = None
        self._turn = asyncio.Lock()
        self._answering: set[asyncio.Task[None]] = set()
        self._ends = False
        self._closed = False

    async def serve(self) -> None:
        """Answer messages until the socket drops, then end the session."""
        self._slot.on_change = self._changed
        try:
            if not await self._open():
                return
            while True:
                message = await self._receive()
                if message["type"] != "websocket.receive" or self._slot.revoked:
                    return
                text = message.get("text")
                task = asyncio.get_running_loop().create_task(
                    self._answer(message["bytes"] if text is None else text)
                )
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
                self._services.unanswered.add(task)
                if len(self._answering) >= self._services.settings.max_in_flight:
                    await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._slot.on_change = None
            self._closed = True
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            self._end_session()
            self._services.socket_dropped(self._context)

    def _changed(self) -> None:
        """Note what has become of the token."""
        if not self._slot.revoked:
            assert self._slot.caller is not None
            self._context.caller = self._slot.caller
            return
        self._closed = True
        self._services.unanswered.add(asyncio.get_running_loop().create_task(close_revoked(self._send)))

    async def _open(self) -> bool:
        """Make the session; a client that cannot have one is told so, as OpenEnv tells it."""
        try:
            await self._make({})
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this socket, not the server
            problem = as_problem(error)
            self._services.metrics.problems[problem.code] += 1
            payload = error_payload(problem, opening=True)
            if problem.code == "at_capacity":
                payload["data"].update(self._services.capacity())
            self._ends = True
            await self._say(dumps(payload, binary=False))
            return False
        return True

    async def _answer(self, data: str | bytes) -> None:
        # A client that went away meanwhile takes the session with it.
        with contextlib.suppress(OSError):
            try:
                await self._turn.acquire()
            except asyncio.CancelledError:
                await self._say(self._given_up())
                return
            try:
                if not self._closed:
                    await self._say(await self._content(data))
            finally:
                self._turn.release()

    async def _content(self, data: str | bytes) -> bytes | None:
        """The answer to a message; None where there is none to a goodbye."""
        limit = self._services.settings.max_reply_bytes
        try:
            payload = await self._take(data)
            if payload is None:
                self._ends = True
                return None
            content = dumps(payload, binary=False)
            if len(content) > limit:
                raise too_large_reply(len(content), limit)
        except asyncio.CancelledError:
            return self._given_up()
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this message, not the socket
            return self._refused(as_problem(error))
        return content

    def _given_up(self) -> bytes:
        """The answer to a message that the server waits for no longer, because it ends.

        Raises:
            asyncio.CancelledError: The client has gone.
        """
        if self._closed:
            raise asyncio.CancelledError
        return self._refused(going_away())

    def _refused(self, problem: ProblemError) -> bytes:
        """The answer that a problem is."""
        self._services.metrics.problems[problem.code] += 1
        payload = error_payload(problem)
        self._ends = payload["data"]["code"] == "SESSION_ERROR"
        return dumps(payload, binary=False)

    async def _say(self, content: bytes | None) -> None:
        """Send an answer, and close the socket after the last one."""
        self._closed = self._ends
        if content is not None:
            await self._send({"type": "websocket.send", "text": content.decode()})
        if self._ends:
            # The slot is free before the client hears of it: it may want another at once.
            self._end_session()
            await self._send({"type": "websocket.close"})

    async def _take(self, data: str | bytes) -> dict[str, Any] | None:
        """Do what a message says; its answer, or None where it says goodbye."""
        size = len(data) if isinstance(data, bytes) else len(data.encode())
        if size > self._services.settings.max_request_bytes:
            raise too_large_request(size, self._services.settings.max_request_bytes)
        try:
            message = loads(data, binary=False)
        except DecodeError as error:
            return wire_error("INVALID_JSON", f"Invalid JSON: {error}")
        if not isinstance(message, dict):
            raise invalid("", "a message must be an object with a type")
        kind = message.get("type", "")
        for name in message.keys() - {"type", "data"}:
            raise invalid(name, "a message has no such field")
        if kind == "step":
            return await self._step(message.get("data"))
        if kind == "reset":
            return await self._reset(message.get("data", {}))
        if kind == "state":
            return await self._state()
        if kind == "close":
            return None
        return wire_error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: Any) -> dict[str, Any]:
        request = validate(OpenEnvResetRequest, data)
        kwargs = self._kwargs if request.kwargs is None else request.kwargs
        if not self._session or kwargs != self._kwargs:
            await self._make_anew(kwargs)
        begin = {"seed": request.seed, "options": request.options}
        reply = await self._operate("reset", {"session_id": self._session_id(), **begin})
        self._episode_id = request.episode_id
        return self._observed(reply)

    async def _step(self, data: Any) -> dict[str, Any]:
        request = validate(OpenEnvAction, data)
        reply = await self._operate("step", {"session_id": self._session_id(), "action": request.action})
        return self._observed(reply)

    async def _state(self) -> dict[str, Any]:
        described = await self._operate("session", {"session_id": self._session_id()})
        return {"type": "state", "data": state_payload(described, self._episode_id)}

    # -- the session ---------------------------------------------------------------------------------------------

    async def _make(self, kwargs: dict[str, Any]) -> None:
        fields = {"env_id": self._env_id, "kwargs": kwargs}
        making = asyncio.get_running_loop().create_task(self._operate("make", fields))
        try:
            self._session = await asyncio.shield(making)
        except asyncio.CancelledError:
            # A client that goes away does not keep another server from making a session, which would never end.
            self._services.unanswered.add(making)
            making.add_done_callback(self._end_made)
            raise
        self._kwargs = kwargs

    async def _make_anew(self, kwargs: dict[str, Any]) -> None:
        """Make the session with other kwargs; where it cannot be made with these, the one that there is goes on."""
        before = self._session
        try:
            await self._make(kwargs)
        except ProblemError as problem:
            if not before or problem.code != "at_capacity":
                raise
            # There is no room for two, not even for a moment.
            self._end_session()
            await self._make(kwargs)
        else:
            if before:
                self._services.operations.end(self._context, before["session_id"])

    def _end_made(self, making: "asyncio.Task[Reply]") -> None:
        if not making.cancelled() and making.exception() is None:
            self._services.operations.end(self._context, making.result()["session_id"])

    def _end_session(self) -> None:
        session, self._session = self._session, {}
        if session:
            self._services.operations.end(self._context, session["session_id"])

    def _session_id(self) -> str:
        if not self._session:
            raise ProblemError("not_reset", "the environment could not be made with other kwargs; reset it")
        return str(self._session["session_id"])

    async def _operate(self, op: str, fields: Mapping[str, Any]) -> Reply:
        return await operate(self._services.operations, self._context, op, fields)

    def _observed(self, reply: Reply) -> dict[str, Any]:
        observation_type = self._session["observation_space"]["type"]
        return {"type": "observation", "data": observation_payload(reply, observation_type)}
