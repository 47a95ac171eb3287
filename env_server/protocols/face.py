"""What a face of the server consists of: another project's protocol, in which every environment can be played.

Faces are mounted once, when the application is made: a request finds its route as one of our own calls does.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollgym.env_server.http.openapi import EnvironmentDocument, Tag
from rollgym.env_server.http.socket import Receive, Scope, Send
from rollgym.env_server.operations.services import Services

ServeSocket = Callable[[Services, Scope, Receive, Send], Awaitable[None]]
"""Serves one WebSocket, from the handshake to its end; the path's parameters are in `scope["path_params"]`."""

Respond = Callable[[Request, Mapping[str, str]], Awaitable[Response]]
"""Answers one request, of whatever method, given its headers by their names in lower case."""


class SocketRoute(NamedTuple):
    """A WebSocket: its path, what it is for, as a description says it, and what serves it."""

    path: str
    what: str
    serve: ServeSocket


class MessageRoute(NamedTuple):
    """A path whose messages have a form of their own, such as JSON-RPC, which routes of calls have no words for.

    Attributes:
        path: The path.
        methods: Those that are answered there.
        described: What OpenAPI says of it, by method in lower case.
        responder: Makes what answers, once for each server.
    """

    path: str
    methods: Sequence[str]
    described: Mapping[str, Any]
    responder: Callable[[Services], Respond]


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """A protocol of others that a server speaks to its clients.

    Attributes:
        name: Its name.
        clients: Whose clients speak it: its row in the documentation.
        address: What these clients take for the server's address.
        page: Where the documentation tells more.
        tag: What its calls are listed under in OpenAPI; None for the server's own tag.
        hot: Routes of calls for each step or episode, made by `call_router(route_class=PlainRoute)`.
        calls: Routes of further calls, made by `call_router`.
        at_root: Whether its calls begin with any environment's id: they are the last that a request is compared with.
        sockets: Its WebSockets.
        messages: Its paths with messages of another form.
        document: An OpenAPI document of each environment, if its clients look for one.
    """

    name: str
    clients: str
    address: str
    page: str
    tag: Tag | None = None
    hot: Sequence[BaseRoute] = ()
    calls: Sequence[BaseRoute] = ()
    at_root: bool = False
    sockets: Sequence[SocketRoute] = ()
    messages: Sequence[MessageRoute] = ()
    document: EnvironmentDocument | None = None

    @property
    def paths(self) -> Iterator[str]:
        """The paths of all that it answers."""
        yield from (route.path for route in (*self.hot, *self.calls) if isinstance(route, Route))
        yield from (each.path for each in self.sockets)
        yield from (each.path for each in self.messages)
        if self.document is not None:
            yield self.document.path
