"""The ASGI application: HTTP calls by the table in `calls`, and the socket."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from clients.protocol.errors import ProblemError
from clients.protocol.frames import dumps
from env_server.access.context import Context
from env_server.access.origins import Origins
from env_server.access.tokens import NOBODY, Tokens
from env_server.common.io_process import Lifecycle, Phase, going_away
from env_server.http.calls import CALLS, INTERACTIVE_SESSION_PATH, REGISTRATION_CALLS, RUN_CODE_CALLS, Call
from env_server.http.console.pages import Console
from env_server.http.interactive_socket import serve_interactive_socket
from env_server.http.openapi import describe_calls
from env_server.http.socket import reject, serve_socket
from env_server.messages.envelope import as_problem
from env_server.messages.fields import ENVELOPE
from env_server.messages.negotiation import (
    answer,
    own_path,
    problem_answer,
    read_fields,
    read_headers,
    wants_binary,
)
from env_server.messages.validation import invalid
from env_server.operations.services import Services
from env_server.protocols.gem import GEM_CALLS
from env_server.protocols.mcp import McpAdapter, mcp_env_id
from env_server.protocols.openenv import OPENENV_CALLS
from env_server.protocols.openenv_socket import openenv_env_id, serve_openenv_socket
from env_server.protocols.operating import operate
from env_server.sessions.replies import Reply

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SOCKET_PATH = "/v1/ws"


class App:
    """Answers HTTP requests and sockets.

    Args:
        services: What does the work.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lifecycle: Lifecycle = services.lifecycle
        self._tokens: Tokens = services.tokens
        self._origins = Origins(services.settings.allowed_origins, loopback_only=not services.tokens.required)
        self._limit = services.settings.max_request_bytes
        self._reply_limit = services.settings.max_reply_bytes
        self._mcp = McpAdapter(services)
        own = (*CALLS, *REGISTRATION_CALLS) if services.settings.gateway else CALLS
        code = RUN_CODE_CALLS if services.settings.runs_code else ()
        self._calls = (*own, *code, *GEM_CALLS, *OPENENV_CALLS)
        self._static: dict[tuple[str, str], Call] = {
            (call.method, call.path): call for call in self._calls if not call.parameters
        }
        self._patterns: list[tuple[str, re.Pattern[str], Call]] = [
            (call.method, call.pattern(), call) for call in self._calls if call.parameters
        ]
        self._pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        console = Console()
        self._pages.update(dict.fromkeys(console.paths, console.respond))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one socket."""
        if scope["type"] == "websocket":
            try:
                self._origins.check(Headers(scope=scope))
            except ProblemError as problem:
                await receive()
                await reject(self._services, send, problem)
                return
            path = own_path(scope)
            if path == SOCKET_PATH:
                await serve_socket(self._services, scope, receive, send)
            elif (env_id := openenv_env_id(path)) is not None:
                await serve_openenv_socket(self._services, env_id, scope, receive, send)
            elif path == INTERACTIVE_SESSION_PATH:
                await serve_interactive_socket(self._services, scope, receive, send)
            else:
                await receive()
                await reject(
                    self._services, send, ProblemError("not_found", f"the socket is at {SOCKET_PATH}")
                )
        elif scope["type"] == "http":
            request = Request(scope, self._counted(receive))
            try:
                response = await self._respond(request)
            except ClientDisconnect:
                return
            self._services.metrics.http_sent += len(response.body)
            await response(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        """What a request is read with, its bytes counted."""
        metrics = self._services.metrics

        async def counted() -> MutableMapping[str, Any]:
            message = await receive()
            metrics.http_received += len(message.get("body", b""))
            return message

        return counted

    async def _respond(self, request: Request) -> Response:
        try:
            headers = read_headers(request)
            self._origins.check(headers)
            return await self._route(request, headers)
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:
            # The server ends and waits for this answer no longer; whoever asked is told so all the same.
            failure = going_away()
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this call, not the server
            failure = as_problem(error)
        self._services.metrics.problems[failure.code] += 1
        return problem_answer(failure)

    async def _route(self, request: Request, headers: Mapping[str, str]) -> Response:
        method, path = request.scope["method"], own_path(request.scope)
        page = self._pages.get(path)
        if page is not None and method in ("GET", "HEAD"):
            return await page(request)
        call = self._static.get((method, path))
        if call is not None:
            return await self._run(request, headers, call, {})
        if (env_id := mcp_env_id(path)) is not None:
            return await self._mcp.respond(request, headers, env_id)
        for call_method, pattern, call in self._patterns:
            if call_method == method and (found := pattern.fullmatch(path)) is not None:
                return await self._run(request, headers, call, found.groupdict())
        raise ProblemError("not_found", f"there is no call {method} {path[:200]}{self._hint(method, path)}")

    def _hint(self, method: str, path: str) -> str:
        for calls, hint in (
            (REGISTRATION_CALLS, "a server takes registrations that is started with --gateway"),
            (RUN_CODE_CALLS, "a server runs programs that is started with --sandbox"),
        ):
            if any(call.method == method and call.pattern().fullmatch(path) for call in calls):
                return f"; {hint}"
        return ""

    async def _run(
        self, request: Request, headers: Mapping[str, str], call: Call, parameters: dict[str, str]
    ) -> Response:
        services = self._services
        caller = NOBODY if call.role is None else self._tokens.from_headers(headers)
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token")
        if call.role is not None:
            caller.require(call.role)
        binary = wants_binary(headers)
        fields = await read_fields(request, headers, self._limit)
        if call.request is None and fields:
            raise invalid(next(iter(fields)), "this call takes no body")
        for name in fields.keys() & ENVELOPE:
            raise invalid(name, "this call has no such field")
        if call.query is not None:
            fields = dict(request.query_params)
        elif request.query_params:
            raise invalid(next(iter(request.query_params)), "this call takes no query")
        fields.update(parameters)
        traceparent = headers.get("traceparent") if services.keeps_traces else None
        context = Context(caller, binary=binary, traceparent=traceparent)
        if call.handler is not None:
            reply = await call.handler(services.operations, context, fields)
        elif call.abandoned:
            reply = await _unless_gone(request, operate(services.operations, context, call.op, fields))
        else:
            reply = await operate(services.operations, context, call.op, fields)
        if call.empty:
            return Response(status_code=call.status)
        return answer(
            reply,
            binary=binary,
            limit=self._reply_limit,
            status=call.status,
            take_back=partial(services.operations.take_back, context),
        )

    # -- pages ---------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return answer({"status": "alive"}, binary=False, limit=self._reply_limit)

    async def _ready(self, request: Request) -> Response:
        phase = self._lifecycle.phase
        reasons = await self._services.readiness()
        body = {
            "status": "unready" if reasons and phase is Phase.READY else phase.value,
            "reasons": [reason._asdict() for reason in reasons],
        }
        status = 503 if reasons else 200
        return answer(body, binary=False, limit=self._reply_limit, status=status)

    async def _metrics(self, request: Request) -> Response:
        caller = self._tokens.from_headers(request.headers)
        if caller is None:
            raise ProblemError("unauthorized", "metrics need a token with the role 'admin'")
        caller.require("admin")
        return Response(await self._services.metrics_text(caller), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        document = describe_calls(self._calls, needs_token=self._tokens.required)
        return Response(dumps(document, binary=False), media_type="application/json")


async def _unless_gone(request: Request, answering: Coroutine[Any, Any, Reply]) -> Reply:
    """Wait for an answer, but no longer than for somebody who waits for it.

    Raises:
        ClientDisconnect: If the client went away; what it had asked for was cancelled.
    """
    answer_ready = asyncio.create_task(answering)
    # The body has been read; what comes next is that the client has gone.
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer_ready, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer_ready.done():
            raise ClientDisconnect
        return answer_ready.result()
    finally:
        gone.cancel()
        answer_ready.cancel()
