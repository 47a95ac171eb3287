"""Calls over HTTP: the caller is authenticated and the body read, within its limit, before validation."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, WithJsonSchema
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import NOBODY, Role
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.negotiation import answer, problem_answer, read_fields, wants_binary
from rollgym.env_server.common.requests import (
    ENVELOPE,
    Validated,
    as_problem,
    invalid,
    misfit_problem,
    validate,
)
from rollgym.env_server.http.transport.connection import CAME
from rollgym.env_server.operations.operations import SOCKET_OPS
from rollgym.env_server.operations.services import Services
from rollgym.env_server.sessions.replies import Reply

SERVICES = "rollgym.services"
"""The key of a request's scope under which the server's services stand."""
HEADERS = "rollgym.headers"
"""The key of a request's scope under which its headers stand, parsed once."""

PathId = Annotated[str, WithJsonSchema({"type": "string", "pattern": IDENTIFIER})]
"""An id in a path. One that cannot be is not found, as one that is not there."""


class Call(Request):
    """A call over HTTP: the caller and the fields of its request.

    FastAPI reads a body before it runs dependencies, and knows JSON only. So it gets empty fields, which `Needs` fills
    after authentication.

    Attributes:
        services: The server's services.
        context: The caller.
        fields: Of its body or query, as they came.
    """

    context: Context

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.services: Services = scope[SERVICES]
        self.fields = Validated()

    @property
    def headers(self) -> Headers:
        """The headers of the placeholder body that FastAPI receives."""
        return Headers({"content-type": "application/json"})

    async def body(self) -> bytes:
        """A placeholder body, so that FastAPI calls `json`."""
        return b"{}"

    async def json(self) -> Any:
        """The fields of the body, filled in later."""
        return self.fields

    async def run(self, request: BaseModel | None = None, /, **named: str) -> Response:
        """Answer with the operation that the route is named after.

        Args:
            request: The validated request, if the call has a body or a query.
            **named: The parameters of the path.

        Raises:
            ProblemError: Any of the operation's problems.
        """
        self.fields.update(named)
        self.fields.request = request
        reply = self.services.operations.call(self.context, self.scope["route"].name, self.fields)
        if not isinstance(reply, dict):
            reply = await reply
            # Many may be answered at once where another server has answered a burst.
            await self.services.admissions.turn()
        return self.answer(reply)

    def answer(self, reply: Reply | list[Any]) -> Response:
        """A response in the requested encoding; without a body if the route's status has none.

        Raises:
            ProblemError: `too_large`.
        """
        status = self.scope["route"].status_code or 200
        if status == 204:
            return Response(status_code=status)
        return answer(
            reply,
            binary=self.context.binary,
            limit=self.services.settings.max_reply_bytes,
            portable_limit=self.services.portable_limit,
            status=status,
            take_back=partial(self.services.operations.take_back, self.context)
            if isinstance(reply, dict)
            else None,
        )

    async def refuse(self, problem: ProblemError) -> Response:
        """Refuse an invalid request, as operations refuse frames: checks of its session and its rate come first.

        Args:
            problem: Why it does not fit.

        Raises:
            ProblemError: The given problem, or one of the earlier checks.
        """
        try:
            return await self.run(**self.scope["route"].named(self.scope))
        except ProblemError as found:
            # A call of another protocol is not one of the server's own operations.
            raise problem if found.code == "unknown_op" else found from None

    async def unless_gone(self, answering: Coroutine[Any, Any, Response]) -> Response:
        """Wait for an answer, but only while the client is connected.

        Raises:
            ClientDisconnect: If the client disconnected; its operation was cancelled.
        """
        answer_ready = asyncio.create_task(answering)
        # The body has been read, so the next message is the disconnect.
        gone: asyncio.Future[Any] = asyncio.ensure_future(self.receive())
        try:
            await asyncio.wait({answer_ready, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer_ready.done():
                raise ClientDisconnect
            return answer_ready.result()
        finally:
            gone.cancel()
            answer_ready.cancel()


class Needs:
    """The dependency of all calls: that the caller has a role; then their body is read.

    Args:
        role: The role that it needs if tokens are set; None if it needs no token.
    """

    def __init__(self, role: Role | None) -> None:
        self._role = role

    async def __call__(self, call: Call) -> None:
        """Read a call.

        Raises:
            ProblemError: The caller lacks the role, or the body or a field of it is invalid.
        """
        services, headers, route = call.services, call.scope[HEADERS], call.scope["route"]
        # Before its body is read, which is for its client to send.
        waited_s = services.overload.excess_s(call.scope.get(CAME))
        caller = NOBODY if self._role is None else services.tokens.from_headers(headers)
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token")
        if self._role is not None:
            caller.require(self._role)
        fields = await read_fields(call, headers, services.settings.request_limit(route.name))
        if fields and not route.takes_body:
            raise invalid(next(iter(fields)), "this call takes no body")
        for name in fields.keys() & ENVELOPE:
            raise invalid(name, "this call has no such field")
        if call.scope["query_string"] and (query := call.query_params):
            if not route.takes_query:
                raise invalid(next(iter(query)), "this call takes no query")
            fields.update(query)
        traceparent = headers.get("traceparent") if services.keeps_traces else None
        call.context = Context(caller, binary=wants_binary(headers), traceparent=traceparent)
        call.context.waited_s = waited_s
        call.fields.update(fields)


class CallRoute(APIRoute):
    """A call as FastAPI's routes are. Its body is its function's `request`, its query the function's `query`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        parameters = inspect.signature(endpoint).parameters
        self.takes_body = "request" in parameters
        self.takes_query = "query" in parameters
        super().__init__(path, endpoint, **described)
        self.summary, self.description = self.description.removesuffix("."), ""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; every failure becomes a problem."""
        respond = super().get_route_handler()

        async def handle(request: Request) -> Response:
            call = Call(request.scope, request.receive)
            return await answered(request.scope, self._validated(call, respond))

        return handle

    async def _validated(self, call: Call, respond: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            return await respond(call)
        except RequestValidationError as error:
            # The location of an error begins with `body` or `query`.
            problem = misfit_problem([(each["loc"][1:], each["msg"]) for each in error.errors()])
        return await call.refuse(problem)

    def named(self, scope: Scope) -> dict[str, str]:
        """The path's parameters of this route: an enclosing application may have added others."""
        return {name: scope["path_params"][name] for name in self.param_convertors}


class PlainRoute(CallRoute):
    """A call that FastAPI describes but does not run: a hot one, most of whose cost would be FastAPI's.

    Its function is called as FastAPI would call it, but for the request of an operation: that is left to the operation,
    and None here. `benchmarks/serving/http_routes.py` measures both ways.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        (needs,) = self.dependencies
        assert isinstance(needs.dependency, Needs)
        self._needs = needs.dependency
        self._model: type[BaseModel] = inspect.signature(endpoint).parameters["request"].annotation

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the request is for this route; the same path with another method may belong to another route."""
        if scope["type"] != "http" or scope["method"] not in (self.methods or ()):
            return Match.NONE, {}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the operation's reply."""
        response = await answered(scope, self._answer(Call(scope, receive)))
        await response(scope, receive, send)

    async def _answer(self, call: Call) -> Response:
        await self._needs(call)
        # Operations validate frames themselves, and so requests from here: most steps need no model.
        request = None if self.name in SOCKET_OPS else validate(self._model, call.fields)
        response: Response = await self.endpoint(call, request=request, **self.named(call.scope))
        return response


class _NoAnswer(Response):
    """The response for a client that has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def answered(scope: Scope, answering: Awaitable[Response]) -> Response:
    """Always return a response: failures become problems."""
    unanswered = scope[SERVICES].unanswered
    task = unanswered.enter()
    try:
        response = await answering
    except ClientDisconnect:
        return _NoAnswer()
    except asyncio.CancelledError:
        # The server is shutting down and stops waiting for this answer; the caller still gets a problem.
        return problem_response(scope, going_away())
    except Exception as error:  # noqa: BLE001 - a defect of ours costs this call, not the server
        return problem_response(scope, as_problem(error))
    finally:
        unanswered.leave(task)
    scope[SERVICES].metrics.http_sent += len(response.body)
    return response


def problem_response(scope: Scope, problem: ProblemError) -> Response:
    """A problem as an answer, which is counted."""
    metrics, response = scope[SERVICES].metrics, problem_answer(problem)
    metrics.problems[problem.code] += 1
    metrics.http_sent += len(response.body)
    return response


def call_router(role: Role | None = "play", route_class: type[CallRoute] = CallRoute) -> APIRouter:
    """A router for calls whose functions are named after their operations.

    Args:
        role: The role that they need if tokens are set; None if they need no token.
        route_class: Whether FastAPI runs them.
    """
    return APIRouter(
        dependencies=[Depends(Needs(role))],
        route_class=route_class,
        generate_unique_id_function=_operation_id,
    )


def _operation_id(route: APIRoute) -> str:
    return f"{min(route.methods or ()).lower()}_{route.name}" + ("_one" if "{" in route.path else "")
