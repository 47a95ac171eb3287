"""A server within another program: beside its event loop, or as a part of its ASGI application.

In a program of one's own, a debugger can reach the code of environments.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.routing import Router

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog, named_class
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.negotiation import problem_answer
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.common.settings_loading import check_settings
from rollgym.env_server.http.socket import Receive, Scope, Send
from rollgym.env_server.http.transport.serving import EmbeddedServer, http_config
from rollgym.env_server.operations.services import Services
from rollgym.env_server.process.app import App
from rollgym.env_server.process.server import bind, url_of
from rollgym.env_server.protocols.faces import served_faces

__all__ = ["ConfigurationError", "create_app", "serve_here"]


_IDLE_S = 86400.0
"""A session survives an hour at a breakpoint."""

# Settings that the enclosing program decides: addresses, logging, environment variables.
_OF_A_PROGRAM = (
    *("host", "port", "processes", "log_level", "log_format", "register_with", "advertise"),
    *("sandbox", "stop_at_end_of_input"),
)


@asynccontextmanager
async def serve_here(environments: Sequence[str], *, allow_expert: bool = False) -> AsyncIterator[str]:
    """Serve on a free loopback port, in this process and its running event loop, while the context is open.

    Nothing of the process is changed: no signal handlers, no logging, no other event loop.

    Args:
        environments: The environments to serve beside the built-in ones, as `module:Class` or `name=module:Class`. They
            run in the event loop's thread, regardless of their declarations.
        allow_expert: Whether clients may ask environments for expert actions.

    Yields:
        The server's URL.

    Raises:
        ConfigurationError: If an environment cannot be imported or made.
    """
    settings = ServerSettings(
        port=0,
        workers=1,
        env=tuple(environments),
        isolation={named_class(text)[0]: "inline" for text in environments},
        allow_expert=allow_expert,
        idle_timeout_s=_IDLE_S,
    )
    services = Services(settings, ProcessRank(), Tokens.load(None), Catalog.load(settings))
    listening = bind(settings.host, settings.port)
    server = EmbeddedServer(http_config(App(services), settings, services.admissions))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await services.start()
        yield url_of(settings.host, listening)
    finally:
        server.should_exit = True
        await serving
        await services.stop()


def create_app(**settings: Any) -> "MountedServer":
    """A server as an ASGI application: to be mounted in another one, also below a prefix, or served as it is.

    An application that mounts another does not start it (Starlette's and FastAPI's do not pass lifespan on), so the
    one around it enters `lifespan`:

        environments = rollgym.create_app(env=["my_package.game:Game"], token_file="tokens.yaml")
        app = FastAPI(lifespan=environments.lifespan)
        app.mount("/environments", environments)

    Args:
        **settings: Settings of `roll-serve` by the names that they have in its configuration file, except those of a
            program of its own: listening address, processes, log, gateways to register with, and the sandbox. Mappings
            such as `isolation` are dicts.

    Raises:
        ConfigurationError: If a setting is not one, cannot be used, or belongs to a program of its own.
    """
    for name in _OF_A_PROGRAM:
        if name in settings:
            raise ConfigurationError(f"{name} belongs to a server that is a program: use roll-serve for it")
    return MountedServer(check_settings(settings))


class MountedServer:
    """A server for mounting in another application.

    Args:
        settings: Its environments, callers and limits.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._tokens = Tokens.load(settings.token_file)
        self._faces = served_faces(settings.face)
        self._app: App | None = None
        self._alone = Router(lifespan=self.lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one socket, or the lifespan if it is served by itself."""
        if scope["type"] == "lifespan":
            await self._alone(scope, receive, send)
        elif self._app is None:
            detail = "this server is not started: the application around it has to enter its lifespan"
            await _refuse(scope, receive, send, ProblemError("draining", detail, retry_after=1))
        elif not self._tokens.required and _is_far(scope):
            detail = "this server has no tokens, so it answers to this machine only; the operator can set token_file"
            await _refuse(scope, receive, send, ProblemError("forbidden", detail))
        else:
            await self._app(scope, receive, send)

    @asynccontextmanager
    async def lifespan(self, around: object = None) -> AsyncIterator[None]:
        """Serve while the context is open; at its end, running operations get `drain_grace_s` to finish.

        Args:
            around: The application that it is mounted in, as Starlette gives it; it is not looked at.

        Raises:
            ConfigurationError: If an environment or `state_dir` cannot be made, or the server is started already.
        """
        if self._app is not None:
            raise ConfigurationError("this server is started already; create_app makes another one")
        settings = self._settings
        settings.make_state_dir()
        services = Services(
            settings, ProcessRank(directory=settings.state_dir), self._tokens, Catalog.load(settings)
        )
        self._app = App(services, self._faces)
        try:
            await services.start()
            yield
            await services.drain()
        finally:
            self._app = None
            await services.stop()


def _is_far(scope: Scope) -> bool:
    """Whether a client has the address of another machine."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        # A Unix socket, or a test's own client.
        return False
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def _refuse(scope: Scope, receive: Receive, send: Send, problem: ProblemError) -> None:
    if scope["type"] == "http":
        await problem_answer(problem)(scope, receive, send)
        return
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": problem.code})
