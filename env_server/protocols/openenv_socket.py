"""OpenEnv's sockets: one socket is one session, and the session ends with it."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.datastructures import Headers, QueryParams

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import GONE, ProblemError
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.quotas import ConnectionSlot
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.negotiation import too_large_reply, too_large_request
from rollgym.env_server.common.requests import as_problem, invalid, validate
from rollgym.env_server.http.socket import Receive, Scope, Send, close_revoked, name_socket, reject
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.mcp_forms import PARSE_ERROR, error_message, is_request_id, seen_text
from rollgym.env_server.protocols.openenv_forms import (
    OpenEnvAction,
    OpenEnvCallTool,
    OpenEnvListTools,
    OpenEnvResetRequest,
    called_payload,
    error_payload,
    observation_payload,
    rpc_problem,
    state_payload,
    tools_payload,
    uncalled_payload,
    wire_error,
)
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.protocols.tools import OpenEnvTools, SessionTools
from rollgym.env_server.sessions.replies import Reply


async def serve_openenv_socket(
    services: Services,
    scope: Scope,
    receive: Receive,
    send: Send,
    socket_class: "type[OpenEnvSocket] | None" = None,
) -> None:
    """Accept one socket of OpenEnv's and serve it until it drops.

    Args:
        services: Carries out the operations.
        scope: The socket's, at an environment's path; a query `session_id` names a session that was made over HTTP.
        receive: Returns the next message.
        send: Sends a message.
        socket_class: The class that handles its messages; None for those of `/ws`.
    """
    env_id = scope["path_params"]["env_id"]
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
        attached = QueryParams(scope["query_string"]).get("session_id")
        made = (socket_class or OpenEnvSocket)(services, env_id, slot, context, receive, send, attached)
        await made.serve()
    except OSError:
        # uvicorn says in this way that the client went away while an answer was being sent.
        pass
    finally:
        services.metrics.sockets -= 1
        services.sockets.leave(slot)


class OpenEnvSocket:
    """One open socket, and its session.

    A socket may name a session that was made over HTTP; it then uses that session, which outlives the socket.

    Messages have no ids, so they are answered in order. The socket is read even while a message is answered: when the
    client disconnects, its session ends at once, whatever runs on it.
    """

    def __init__(
        self,
        services: Services,
        env_id: str,
        slot: ConnectionSlot,
        context: Context,
        receive: Receive,
        send: Send,
        attached: str | None = None,
    ) -> None:
        self._services = services
        self._env_id = env_id
        self._slot = slot
        self._context = context
        self._receive = receive
        self._send = send
        self._attached = attached
        self._session: Reply = {}
        self._tools = OpenEnvTools(services, env_id, context)
        self._resets = 0
        self._name = secrets.token_hex(8)
        self._has_begun = False
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
        """Handle the revocation or the change of the token."""
        if not self._slot.revoked:
            assert self._slot.caller is not None
            self._context.caller = self._slot.caller
            return
        self._closed = True
        self._services.unanswered.add(asyncio.get_running_loop().create_task(close_revoked(self._send)))

    async def _open(self) -> bool:
        """Make the session; a client that cannot have one gets OpenEnv's error message."""
        try:
            await (self._make({}) if self._attached is None else self._attach(self._attached))
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this socket, not the server
            problem = as_problem(error)
            self._services.metrics.problems[problem.code] += 1
            self._ends = True
            await self._say(dumps(self._unopened(problem), binary=False))
            return False
        return True

    def _unopened(self, problem: ProblemError) -> dict[str, Any]:
        """The error message for a client that cannot have a session."""
        payload = error_payload(problem, opening=True)
        if problem.code == "at_capacity":
            payload["data"].update(self._services.capacity())
        return payload

    async def _answer(self, data: str | bytes) -> None:
        # If the client has disconnected in the meantime, its session ends.
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
        """The answer to a message; None for a goodbye, which has no answer."""
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
        """The answer to a pending message when the server shuts down.

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
        return dumps(self._refusal(problem, payload), binary=False)

    def _refusal(self, problem: ProblemError, payload: dict[str, Any]) -> dict[str, Any]:
        """A problem as the socket's messages say it, of which the payload is that of `/ws`."""
        return payload

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
        """Carry out a message; return its answer, or None if it says goodbye."""
        size = len(data) if isinstance(data, bytes) else len(data.encode())
        if size > self._services.settings.max_request_bytes:
            raise too_large_request(size, self._services.settings.max_request_bytes)
        try:
            message = loads(data, binary=False)
        except DecodeError as error:
            return self._unreadable(f"Invalid JSON: {error}")
        return await self._do(message)

    def _unreadable(self, reason: str) -> dict[str, Any]:
        """The answer to a message that is not JSON."""
        return wire_error("INVALID_JSON", reason)

    async def _do(self, message: Any) -> dict[str, Any] | None:
        """Carry out a message of `/ws`."""
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
        if kind == "mcp":
            return {"type": "mcp", "data": await self._rpc(message.get("data"))}
        if kind == "close":
            return None
        return wire_error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: Any) -> dict[str, Any]:
        request = validate(OpenEnvResetRequest, data)
        if request.index is not None:
            request = request.of_task(await self._operate("envs", {"env_id": self._env_id}))
        kwargs = self._kwargs if request.kwargs is None else request.kwargs
        if self._attached is not None and request.kwargs is not None:
            raise invalid(
                "kwargs", "a session that was made over HTTP keeps the kwargs that it was made with"
            )
        if not self._session or kwargs != self._kwargs:
            await self._make_anew(kwargs)
        reply = await self._begin(seed=request.seed, options=request.options)
        self._episode_id = request.episode_id
        return self._observed(reply)

    async def _begin(self, **how: Any) -> Reply:
        """Begin an episode; under a request id, so that its tools can be requested."""
        self._resets += 1
        begin = {"session_id": self._session_id(), "request_id": f"{self._name}-{self._resets}", **how}
        reply = await self._operate("reset", begin)
        self._has_begun = True
        return reply

    async def _step(self, data: Any) -> dict[str, Any]:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == "list_tools":
            return await self._list_tools(data)
        if kind == "call_tool":
            return await self._call_tool(validate(OpenEnvCallTool, data))
        request = validate(OpenEnvAction, data)
        operations, session_id = self._services.operations, self._session_id()
        return self._observed(await step_by_text(operations, self._context, session_id, request.action))

    # -- tools ---------------------------------------------------------------------------------------------------

    async def _list_tools(self, data: Any) -> dict[str, Any]:
        validate(OpenEnvListTools, data)
        async with self._looked_into():
            tools = await self._tools.list(await self._begun_session_id())
        return {"type": "observation", "data": tools_payload(tools)}

    async def _call_tool(self, call: OpenEnvCallTool) -> dict[str, Any]:
        name = call.tool_name
        try:
            async with self._looked_into():
                reply = await self._tools.call(await self._begun_session_id(), name, call.arguments)
        except ProblemError as problem:
            if problem.code not in ("invalid_request", "invalid_action"):
                raise
            payload = uncalled_payload(name, "invalid_args", problem.detail)
        else:
            payload = (
                uncalled_payload(name, "tool_not_found", f"there is no tool {name[:100]!r}")
                if reply is None
                else called_payload(name, seen_text(reply), reply)
            )
        return {"type": "observation", "data": payload}

    async def _rpc(self, message: Any) -> dict[str, Any]:
        """Answer a JSON-RPC message; if the session is gone, the socket ends."""
        async with self._looked_into():
            try:
                session_id = await self._begun_session_id()
            except ProblemError as problem:
                message_id = message.get("id") if isinstance(message, dict) else None
                answer = rpc_problem(message_id if is_request_id(message_id) else None, problem)
            else:
                answer = await self._tools.answer(message, session_id)
        self._ends = answer.get("error", {}).get("data", {}).get("code") in GONE
        return answer

    async def _begun_session_id(self) -> str:
        """The session, in an episode: OpenEnv's clients may ask for tools before their first reset."""
        if not self._has_begun:
            await self._begin()
        return self._session_id()

    @contextlib.asynccontextmanager
    async def _looked_into(self) -> AsyncIterator[None]:
        """Request answers as plain data; answers that only pass through may hold encoded parts."""
        self._context.fragments = False
        try:
            yield
        finally:
            self._context.fragments = True

    async def _state(self) -> dict[str, Any]:
        described = await self._operate("session", {"session_id": self._session_id()})
        return {"type": "state", "data": state_payload(described, self._episode_id)}

    # -- the session ---------------------------------------------------------------------------------------------

    async def _attach(self, session_id: str) -> None:
        """Use a session that was made over HTTP, whose episode has begun."""
        session = await SessionTools(self._services.operations, self._env_id).find(self._context, session_id)
        described = await self._operate("envs", {"env_id": self._env_id})
        self._session = {**session, "observation_space": described["observation_space"]}
        self._has_begun = True

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
        self._has_begun = False

    async def _make_anew(self, kwargs: dict[str, Any]) -> None:
        """Make the session with other kwargs; if that fails, the present session stays."""
        before = self._session
        try:
            await self._make(kwargs)
        except ProblemError as problem:
            if not before or problem.code != "at_capacity":
                raise
            # The capacity allows no second session, not even for a moment.
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
        if session and self._attached is None:
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


class OpenEnvRpcSocket(OpenEnvSocket):
    """A socket at `/mcp`, whose messages are JSON-RPC: the agent calls tools, and cannot begin an episode."""

    def _unopened(self, problem: ProblemError) -> dict[str, Any]:
        message = rpc_problem(None, problem)
        if problem.code == "at_capacity":
            message["error"]["data"] |= self._services.capacity()
        return message

    def _refusal(self, problem: ProblemError, payload: dict[str, Any]) -> dict[str, Any]:
        return rpc_problem(None, problem)

    def _unreadable(self, reason: str) -> dict[str, Any]:
        return error_message(None, PARSE_ERROR, reason)

    async def _do(self, message: Any) -> dict[str, Any] | None:
        return await self._rpc(message)
