"""The ASGI application: hot calls and sockets by plain routes, all other calls by FastAPI's.

Requests from web pages are answered only if the page may talk to the server (`Origins`): a browser sends those of any
page, even of a foreign site.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property, partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router, WebSocketRoute

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import NOBODY, Tokens
from rollgym.env_server.common.io_process import Lifecycle, ServerPhase
from rollgym.env_server.common.negotiation import answer, own_path, read_headers
from rollgym.env_server.http.call_routes import HEADERS, SERVICES, answered, problem_response
from rollgym.env_server.http.calls import CALLS, HOT_CALLS, REGISTRATION_CALLS, RUN_CODE_CALLS
from rollgym.env_server.http.console import CONSOLE_CALLS, Console
from rollgym.env_server.http.interactive_socket import serve_interactive_socket
from rollgym.env_server.http.openapi import (
    EnvironmentDocument,
    about_environment,
    describe,
    environment_document,
)
from rollgym.env_server.http.socket import Receive, Scope, Send, reject, serve_socket
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.face import Face, Respond, ServeSocket, SocketRoute
from rollgym.env_server.protocols.faces import OURS, refuse_shared_paths
from rollgym.env_server.protocols.operating import operate

_DEFAULT_PORTS = {"http": 80, "https": 443}

_SOCKET = SocketRoute(
    "/v1/ws", "all operations, many sessions (rollgym.v1.json, rollgym.v1.msgpack)", serve_socket
)
_INTERACTIVE_SOCKET = SocketRoute(
    "/v1/sandbox/session",
    "an interactive session with a program in the sandbox (docs/run_code.md)",
    serve_interactive_socket,
)


class Origins:
    """Refuses requests that a page of another site makes through a browser.

    A browser names the requesting page in `Origin`; other programs send no such header and are not affected. If no
    tokens are set, a page could also point its own name at the address of this machine, so that the browser takes page
    and server for one site (DNS rebinding): `Host` must then be a name that no other site can use.

    Args:
        allowed: The origins of pages that may talk to the server beside its own, such as `https://lab.example`.
        loopback_only: Whether the server is open to all users of this machine, and to no other machine.
    """

    def __init__(self, allowed: Iterable[str], *, loopback_only: bool) -> None:
        self._allowed = {_site(urlsplit(origin)) for origin in allowed}
        self._names = {host for _, host, _ in self._allowed}
        self._loopback_only = loopback_only
        self._checked_host: str | None = None

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request or handshake with these headers, if a page has no business to make it.

        Raises:
            ProblemError: `forbidden`.
        """
        host = headers.get("host")
        if self._loopback_only and host is not None and host != self._checked_host:
            self._check_host(host)
            # A client sends the same with each request, and a check takes as long as a step of a small environment.
            self._checked_host = host
        origin = headers.get("origin")
        if origin is not None:
            self._check_origin(origin, host)

    def _check_host(self, host: str) -> None:
        name = _split(f"//{host}").hostname
        if name is None or not (name in self._names or _is_local(name)):
            raise ProblemError(
                "forbidden",
                f"this server has no tokens, so it answers to local names such as localhost only, not to "
                f"{host[:200]!r}; the operator can name the page's address in allowed_origins, or set token_file",
            )

    def _check_origin(self, origin: str, host: str | None) -> None:
        site = _site(_split(origin))
        if site in self._allowed:
            return
        scheme, name, port = site
        # Behind a proxy that ends TLS the server does not know its own scheme, so the page's own counts.
        own = _site(_split(f"{scheme}://{host or ''}"))
        if not name or own != (scheme, name, port):
            raise ProblemError(
                "forbidden",
                f"pages of {origin[:200]} may not use this server; the operator can name them in allowed_origins",
            )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return urlsplit("")
    return parts


def _site(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _is_local(name: str) -> bool:
    """Whether no one on the Internet can give this name an address: a loopback address, or a name without a dot."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return bool(name) and "." not in name


class App:
    """Answers HTTP requests and sockets.

    Args:
        services: Carries out the operations.
        faces: The protocols of others that it speaks.

    Raises:
        ConfigurationError: A face has a path that something else has.
    """

    def __init__(self, services: Services, faces: Sequence[Face] = OURS) -> None:
        self._services = services
        self._lifecycle: Lifecycle = services.lifecycle
        self._tokens: Tokens = services.tokens
        self._origins = Origins(services.settings.allowed_origins, loopback_only=not services.tokens.required)
        self._reply_limit = services.settings.max_reply_bytes
        hot = [*HOT_CALLS.routes, *(route for face in faces for route in face.hot)]
        calls = [*CALLS.routes, *(route for face in faces if not face.at_root for route in face.calls)]
        if services.settings.gateway:
            calls += REGISTRATION_CALLS.routes
        if services.settings.runs_code:
            calls += RUN_CODE_CALLS.routes
        calls += [route for face in faces if face.at_root for route in face.calls]
        self._described = [*hot, *calls]
        sockets = [_SOCKET, *(socket for face in faces for socket in face.sockets)]
        if services.settings.runs_code:
            sockets.append(_INTERACTIVE_SOCKET)
        self._sockets = {socket.path: socket.what for socket in sockets}
        self._messages = {each.path: each for face in faces for each in face.messages}
        self._tags = [face.tag for face in faces if face.tag is not None]
        self._documents = [face.document for face in faces if face.document is not None]
        self._describing = asyncio.Lock()
        self._is_described = False
        console = Console()
        pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            **dict.fromkeys(console.paths, console.respond),
        }
        refuse_shared_paths((*_own_paths(), *pages), faces)
        pages |= {each.path: partial(self._environment_openapi, each) for each in self._documents}
        self._fastapi = FastAPI(
            routes=[
                *calls,
                *CONSOLE_CALLS.routes,
                *(_page(path, respond) for path, respond in pages.items()),
            ],
            exception_handlers={404: self._not_found, 405: self._not_found},
            redirect_slashes=False,
            openapi_url=None,
        )
        self._router = Router(
            [
                *hot,
                *(WebSocketRoute(socket.path, _Socket(services, socket.serve)) for socket in sockets),
                *(Route(each.path, _Messages(each.responder(services))) for each in self._messages.values()),
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
        # Routes of messages leave the choice of methods to what answers them.
        methods = {
            method for route in named for method in (route.methods or self._messages[route.path].methods)
        }
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

    async def _serve_others(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and own_path(scope) == _INTERACTIVE_SOCKET.path:
            # It says how a server is started that has it.
            await serve_interactive_socket(self._services, scope, receive, send)
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
        reasons = await self._services.reports.readiness()
        body = {
            "status": "unready" if reasons and phase is ServerPhase.READY else phase.value,
            "reasons": [reason._asdict() for reason in reasons],
        }
        status = 503 if reasons else 200
        return answer(body, binary=False, limit=self._reply_limit, status=status)

    async def _metrics(self, request: Request) -> Response:
        caller = self._tokens.from_headers(request.headers)
        if caller is None:
            raise ProblemError("unauthorized", "metrics need a token with the role 'admin'")
        caller.require("admin")
        return Response(await self._services.reports.metrics(caller), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        await self._describe_once()
        root = request.scope.get("root_path")
        if not root:
            return Response(self._document, media_type="application/json")
        mounted = {**self._description, "servers": [{"url": root}]}
        return Response(dumps(mounted, binary=False), media_type="application/json")

    async def _environment_openapi(self, wanted: EnvironmentDocument, request: Request) -> Response:
        """Calls of one environment, as a server of this environment alone would describe them."""
        env_id = request.path_params["env_id"]
        context = Context(NOBODY, binary=False)
        described = await operate(self._services.operations, context, "envs", {"env_id": env_id})
        await self._describe_once()
        base = f"{request.scope.get('root_path') or ''}{wanted.base.format(env_id=env_id)}"
        document = about_environment(self._environment_documents[wanted], described, base)
        return answer(document, binary=False, limit=self._reply_limit)

    async def _describe_once(self) -> None:
        """Write the OpenAPI document before it is used, in a thread: others need not wait for it."""
        async with self._describing:
            if not self._is_described:
                await asyncio.to_thread(lambda: (self._document, self._environment_documents))
                self._is_described = True

    @cached_property
    def _environment_documents(self) -> dict[EnvironmentDocument, dict[str, Any]]:
        return {each: environment_document(self._description, each) for each in self._documents}

    @cached_property
    def _description(self) -> dict[str, Any]:
        """The OpenAPI document, written once, because FastAPI takes a tenth of a second for it."""
        others = {path: each.described for path, each in self._messages.items()}
        return describe(
            self._described,
            self._sockets,
            others,
            self._documents,
            self._tags,
            needs_token=self._tokens.required,
        )

    @cached_property
    def _document(self) -> bytes:
        return dumps(self._description, binary=False)


class _Socket:
    """A plain ASGI application to a route, which takes a function for something else."""

    def __init__(self, services: Services, serve: ServeSocket) -> None:
        self._services = services
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(self._services, scope, receive, send)


class _Messages:
    """The same, for messages that their face answers by itself."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await answered(scope, self._respond(Request(scope, receive), scope[HEADERS]))
        await response(scope, receive, send)


def _own_paths() -> Iterator[str]:
    """The paths of the server's own calls, whatever it was started with."""
    for router in (HOT_CALLS, CALLS, REGISTRATION_CALLS, RUN_CODE_CALLS, CONSOLE_CALLS):
        yield from (route.path for route in router.routes if isinstance(route, Route))
    yield from (_SOCKET.path, _INTERACTIVE_SOCKET.path)


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
