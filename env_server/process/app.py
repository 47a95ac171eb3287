"""The ASGI application: hot calls and sockets by plain routes, all other calls by FastAPI's."""

from collections.abc import Awaitable, Callable, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router, WebSocketRoute

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.origins import Origins
from rollgym.env_server.access.tokens import NOBODY, Tokens
from rollgym.env_server.common.io_process import Lifecycle, Phase
from rollgym.env_server.http.call_routes import HEADERS, SERVICES, answered, problem_response
from rollgym.env_server.http.calls import CALLS, HOT_CALLS, REGISTRATION_CALLS, RUN_CODE_CALLS
from rollgym.env_server.http.console.pages import Console
from rollgym.env_server.http.interactive_socket import serve_interactive_socket
from rollgym.env_server.http.openapi import about_environment, describe, environment_document
from rollgym.env_server.http.socket import Receive, Send, reject, serve_socket
from rollgym.env_server.messages.negotiation import answer, own_path, read_headers
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.gem import GEM_CALLS
from rollgym.env_server.protocols.mcp import McpAdapter
from rollgym.env_server.protocols.mcp_description import MCP_METHODS, MCP_PATH, described_mcp
from rollgym.env_server.protocols.openenv import OPENENV_CALLS, OPENENV_HEALTH
from rollgym.env_server.protocols.openenv import PREFIX as OPENENV
from rollgym.env_server.protocols.openenv_socket import OpenEnvRpcSocket, serve_openenv_socket
from rollgym.env_server.protocols.operating import operate
from rollgym.env_server.protocols.ors import ORS_CALLS

Scope = MutableMapping[str, Any]

OPENENV_MCP = f"{OPENENV}/mcp"
INTERACTIVE_SESSION_PATH = "/v1/sandbox/session"


class App:
    """Answers HTTP requests and sockets.

    Args:
        services: Carries out the operations.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lifecycle: Lifecycle = services.lifecycle
        self._tokens: Tokens = services.tokens
        self._origins = Origins(services.settings.allowed_origins, loopback_only=not services.tokens.required)
        self._reply_limit = services.settings.max_reply_bytes
        hot = [*HOT_CALLS.routes, *GEM_CALLS.routes]
        calls = [*CALLS.routes, *OPENENV_CALLS.routes, *OPENENV_HEALTH.routes]
        if services.settings.gateway:
            calls += REGISTRATION_CALLS.routes
        if services.settings.runs_code:
            calls += RUN_CODE_CALLS.routes
        # Last: an environment's id may be anything at the begin of their paths.
        calls += ORS_CALLS.routes
        self._described = [*hot, *calls]
        sockets = [
            _Socket(
                "/v1/ws",
                "all operations, many sessions (rollgym.v1.json, rollgym.v1.msgpack)",
                self._serve_socket,
            ),
            _Socket(
                f"{OPENENV}/ws",
                "OpenEnv's; one socket is one session (docs/other_protocols.md)",
                self._serve_openenv,
            ),
            _Socket(
                OPENENV_MCP,
                "OpenEnv's JSON-RPC; one socket is one session (docs/other_protocols.md)",
                self._serve_openenv_rpc,
            ),
        ]
        if services.settings.runs_code:
            sockets.append(
                _Socket(
                    INTERACTIVE_SESSION_PATH,
                    "an interactive session with a program in the sandbox (docs/run_code.md)",
                    self._serve_interactive,
                )
            )
        self._sockets = {socket.path: socket.what for socket in sockets}
        console = Console()
        pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            f"{OPENENV}/openapi.json": self._openenv_openapi,
            **dict.fromkeys(console.paths, console.respond),
        }
        self._fastapi = FastAPI(
            routes=[*calls, *(_page(path, respond) for path, respond in pages.items())],
            exception_handlers={404: self._not_found, 405: self._not_found},
            redirect_slashes=False,
            openapi_url=None,
        )
        self._mcp = McpAdapter(services)
        self._router = Router(
            [
                *hot,
                *(WebSocketRoute(socket.path, _Plain(socket.serve)) for socket in sockets),
                Route(MCP_PATH, _Plain(self._serve_mcp)),
                Route(OPENENV_MCP, _Plain(self._serve_openenv_mcp)),
            ],
            redirect_slashes=False,
            default=self._serve_others,
        )

    @property
    def paths(self) -> set[str]:
        """The paths of everything that is answered."""
        return {
            route.path
            for route in (*self._router.routes, *self._fastapi.router.routes)
            if isinstance(route, Route | WebSocketRoute)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one socket."""
        scope[SERVICES] = self._services
        headers = scope[HEADERS] = read_headers(scope)
        try:
            self._origins.check(headers)
        except ProblemError as problem:
            await self._refuse(scope, receive, send, problem)
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and (allowed := self._allowed(scope)):
            await Response(status_code=204, headers={"Allow": ", ".join(allowed)})(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The answer to a GET without its body, whose length it still says.
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        await self._router(scope, self._counted(receive), send)

    def _allowed(self, scope: Scope) -> list[str]:
        """The methods that a path accepts; empty if the path does not exist.

        Runs before authentication: it costs no more than finding the route of a request.
        """
        path = own_path(scope)
        routes = [
            route
            for route in (*self._router.routes, *self._fastapi.router.routes)
            if isinstance(route, Route) and route.path_regex.match(path)
        ]
        # A path with a route of its own is not an id in another route.
        named = [route for route in routes if route.path == path] or routes
        # MCP's routes leave the choice of methods to their handler.
        methods = {method for route in named for method in (route.methods or MCP_METHODS)}
        if "GET" in methods:
            methods.add("HEAD")
        return sorted({*methods, "OPTIONS"}) if methods else []

    def _counted(self, receive: Receive) -> Receive:
        """Wrap the receive function of a request, to count its bytes."""
        metrics = self._services.metrics

        async def counted() -> MutableMapping[str, Any]:
            message = await receive()
            metrics.http_received += len(message.get("body", b""))
            return message

        return counted

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, problem: ProblemError) -> None:
        if scope["type"] == "websocket":
            await receive()
            await reject(self._services, send, problem)
        else:
            await problem_response(scope, problem)(scope, receive, send)

    # -- what is plain -------------------------------------------------------------------------------------------

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_socket(self._services, scope, receive, send)

    async def _serve_openenv(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_openenv_socket(self._services, scope["path_params"]["env_id"], scope, receive, send)

    async def _serve_openenv_rpc(self, scope: Scope, receive: Receive, send: Send) -> None:
        env_id = scope["path_params"]["env_id"]
        await serve_openenv_socket(self._services, env_id, scope, receive, send, OpenEnvRpcSocket)

    async def _serve_interactive(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_interactive_socket(self._services, scope, receive, send)

    async def _serve_mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer_mcp(scope, receive, send, openenv=False)

    async def _serve_openenv_mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer_mcp(scope, receive, send, openenv=True)

    async def _answer_mcp(self, scope: Scope, receive: Receive, send: Send, *, openenv: bool) -> None:
        request, env_id = Request(scope, receive), scope["path_params"]["env_id"]
        response = await answered(scope, self._mcp.respond(request, scope[HEADERS], env_id, openenv=openenv))
        await response(scope, receive, send)

    async def _serve_others(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and own_path(scope) == INTERACTIVE_SESSION_PATH:
            # It says how a server is started that has it.
            await self._serve_interactive(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._refuse(scope, receive, send, ProblemError("not_found", _where_the_socket_is(scope)))
        else:
            await self._fastapi(scope, receive, send)

    # -- pages ---------------------------------------------------------------------------------------------------

    async def _not_found(self, request: Request, error: Exception) -> Response:
        hint = ""
        for calls, started in (
            (REGISTRATION_CALLS, "takes registrations"),
            (RUN_CODE_CALLS, "runs programs"),
        ):
            if any(route.matches(request.scope)[0] is Match.FULL for route in calls.routes):
                option = "--gateway" if calls is REGISTRATION_CALLS else "--sandbox"
                hint = f"; a server {started} that is started with {option}"
        detail = f"there is no call {request.scope['method']} {own_path(request.scope)[:200]}{hint}"
        if allowed := self._allowed(request.scope):
            problem = ProblemError(
                "method_not_allowed", f"{detail}; there is {', '.join(allowed)}", allow=allowed
            )
        else:
            problem = ProblemError("not_found", detail)
        return problem_response(request.scope, problem)

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
        root = request.scope.get("root_path")
        if not root:
            return Response(self._document, media_type="application/json")
        mounted = {**self._description, "servers": [{"url": root}]}
        return Response(dumps(mounted, binary=False), media_type="application/json")

    async def _openenv_openapi(self, request: Request) -> Response:
        """OpenEnv's calls of one environment, as a server of this environment alone would describe them."""
        env_id = request.path_params["env_id"]
        context = Context(NOBODY, binary=False)
        described = await operate(self._services.operations, context, "envs", {"env_id": env_id})
        base = f"{request.scope.get('root_path') or ''}{OPENENV.format(env_id=env_id)}"
        document = about_environment(self._environment_document, described, base)
        return answer(document, binary=False, limit=self._reply_limit)

    @cached_property
    def _environment_document(self) -> dict[str, Any]:
        return environment_document(self._description, OPENENV)

    @cached_property
    def _description(self) -> dict[str, Any]:
        """The OpenAPI document, written once, because FastAPI takes a tenth of a second for it."""
        others = {MCP_PATH: described_mcp(), OPENENV_MCP: described_mcp(openenv=True)}
        return describe(self._described, self._sockets, others, needs_token=self._tokens.required)

    @cached_property
    def _document(self) -> bytes:
        return dumps(self._description, binary=False)


class _Socket(NamedTuple):
    """A WebSocket route: its path, its purpose, and its handler."""

    path: str
    what: str
    serve: Callable[[Scope, Receive, Send], Awaitable[None]]


class _Plain:
    """A plain ASGI application to a route, which takes a function for something else."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


def _without_body(send: Send) -> Send:
    """Send an answer's head alone."""

    async def send_head(message: MutableMapping[str, Any]) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _page(path: str, respond: Callable[[Request], Awaitable[Response]]) -> Route:
    async def page(request: Request) -> Response:
        return await answered(request.scope, respond(request))

    return Route(path, page)


def _where_the_socket_is(scope: Scope) -> str:
    """Say where the socket is; clients add its path to the address that their users give."""
    extra = own_path(scope).removesuffix("/v1/ws")[:200]
    remedy = f": leave {extra!r} off the server's address" if own_path(scope).endswith("/v1/ws") else ""
    return f"the socket is at /v1/ws{remedy}"
