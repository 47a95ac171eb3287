"""The HTTP endpoint for agents: OpenAI's and Anthropic's routes, and the mapping of requests to episodes.

/v1/...                the session is named by the API key
/s/KEY/v1/...          the session is named in the URL
/s/KEY/reward, /end    what an agent says of its episode
/s/KEY/env, /env/step  the episode's environment, over plain HTTP
/s/KEY/mcp             the same as tools of the Model Context Protocol
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollgym.trainer.core.numbers import LARGEST
from rollgym.trainer.rollout.agents.answers import Completion
from rollgym.trainer.rollout.agents.anthropic_messages import MessageEvents, message_body, parse_messages
from rollgym.trainer.rollout.agents.calls import AgentCall, finite, whole
from rollgym.trainer.rollout.agents.chat_completions import ChatChunks, chat_body, parse_chat
from rollgym.trainer.rollout.agents.completions import CompletionChunks, completion_body, parse_completions
from rollgym.trainer.rollout.agents.deliveries import Event, EventStream, LiveAnswer, name_of
from rollgym.trainer.rollout.agents.environment import EpisodeEnvironment, mcp_answer
from rollgym.trainer.rollout.agents.errors import ApiError, invalid
from rollgym.trainer.rollout.agents.http import (
    UnreadBodies,
    anthropic_refusal,
    as_api_error,
    json_answer,
    packed,
    read_body,
    read_json,
    refusal,
    refuse_web_pages,
    while_connected,
)
from rollgym.trainer.rollout.agents.responses import ResponseEvents, parse_responses, response_body
from rollgym.trainer.rollout.agents.session import AgentSession
from rollgym.trainer.rollout.agents.splicing import message_of

_CALL_HEADER = "x-rollgym-call"
_IGNORED_HEADER = "x-rollgym-ignored"


class AgentSessions(Protocol):
    """Finds sessions by their keys."""

    model: str

    def session(self, key: str) -> AgentSession:
        """Return a session.

        Raises:
            ApiError: The session is unknown, or has ended.
        """
        ...

    def environment(self, key: str) -> EpisodeEnvironment | None:
        """Return the environment of a session; None if it has none."""
        ...

    def posted(self, key: str) -> None:
        """A session's agent has said that it is done."""
        ...


def agents_app(sessions: AgentSessions, max_body_bytes: int, further: Iterable[Route] = ()) -> Starlette:
    """Return the endpoint as an application.

    Args:
        sessions: The sessions that requests belong to.
        max_body_bytes: The largest body that is read; a client that keeps sending is cut off at twice as much.
        further: Routes beside those of every endpoint.
    """
    endpoint = _Endpoint(sessions, max_body_bytes)
    routes = [*further, Route("/healthz", _healthy, methods=["GET"])]
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(f"{prefix}/v1/chat/completions", endpoint.guarded(endpoint.chat), methods=["POST"]),
            Route(f"{prefix}/v1/completions", endpoint.guarded(endpoint.completions), methods=["POST"]),
            Route(f"{prefix}/v1/responses", endpoint.guarded(endpoint.responses), methods=["POST"]),
            Route(
                f"{prefix}/v1/messages",
                endpoint.guarded(endpoint.messages, anthropic_refusal),
                methods=["POST"],
            ),
            Route(
                f"{prefix}/v1/messages/count_tokens",
                endpoint.guarded(endpoint.count_tokens, anthropic_refusal),
                methods=["POST"],
            ),
            Route(f"{prefix}/v1/models", endpoint.guarded(endpoint.models), methods=["GET"]),
            Route(f"{prefix}/v1/models/{{model:path}}", endpoint.guarded(endpoint.model), methods=["GET"]),
        ]
    routes += [
        Route("/s/{key}/reward", endpoint.guarded(endpoint.reward), methods=["POST"]),
        Route("/s/{key}/end", endpoint.guarded(endpoint.end), methods=["POST"]),
        Route("/s/{key}/env", endpoint.guarded(endpoint.env), methods=["GET"]),
        Route("/s/{key}/env/step", endpoint.guarded(endpoint.step), methods=["POST"]),
        Route("/s/{key}/mcp", endpoint.guarded(endpoint.mcp), methods=["POST", "GET", "DELETE"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(UnreadBodies, largest=max_body_bytes)],
        exception_handlers={404: _not_found, 405: _not_allowed},
    )


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _not_found(request: Request, error: Exception) -> Response:
    return refusal(ApiError(404, f"there is no {request.url.path[:200]} here", "not_found"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    return refusal(ApiError(405, f"{request.method} is not what this address takes", "method_not_allowed"))


class _Endpoint:
    """Handles the HTTP requests of agents; see `agents_app`."""

    def __init__(self, sessions: AgentSessions, max_body_bytes: int) -> None:
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes
        self._token_text: dict[int, str] = {}

    def guarded(
        self,
        answer: Callable[[Request], Awaitable[Response]],
        refused: Callable[[ApiError], Response] = refusal,
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler whose every failure is an answer in the shape of the API."""

        async def handle(request: Request) -> Response:
            try:
                refuse_web_pages(request)
                return await answer(request)
            except ApiError as error:
                with suppress(ApiError):
                    self._session(request).counts.refused += 1
                return refused(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - the end of a request: every failure is reported
                return refused(as_api_error(error))

        return handle

    # -- the policy

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: answer a conversation of chat messages."""
        session = self._session(request)
        call = parse_chat(await self._json(request))
        if call.stream:
            return await self._streamed(request, session, call, _CHAT)
        answer = await self._answered(request, session, call)
        body = chat_body(call, answer, self._sessions.model, self._texts(session, call, answer))
        return json_answer(body, _headers(answer))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`: continue plain texts."""
        session = self._session(request)
        call = parse_completions(await self._json(request))
        if call.stream:
            return await self._streamed(request, session, call, _COMPLETIONS)
        answer = await self._answered(request, session, call)
        body = completion_body(call, answer, self._sessions.model, self._texts(session, call, answer))
        return json_answer(body, _headers(answer))

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`: answer a request of OpenAI's Responses API."""
        session = self._session(request)
        call = parse_responses(await self._json(request), session.conversations.get)
        if call.stream:
            return await self._streamed(request, session, call, _RESPONSES)
        answer = await self._answered(request, session, call)
        _keep_conversation(session, call, answer)
        body = response_body(call, answer, self._sessions.model, self._texts(session, call, answer))
        return json_answer(body, _headers(answer))

    async def messages(self, request: Request) -> Response:
        """`POST /v1/messages`, as Anthropic has it."""
        session = self._session(request)
        call = parse_messages(await self._json(request))
        if call.stream:
            return await self._streamed(request, session, call, _MESSAGES)
        answer = await self._answered(request, session, call)
        return json_answer(message_body(call, answer, self._sessions.model), _headers(answer))

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: of the prompt that such a request would have."""
        session = self._session(request)
        call = parse_messages(await self._json(request), counted=True)
        return JSONResponse({"input_tokens": await session.count(call)})

    async def _answered(self, request: Request, session: AgentSession, call: AgentCall) -> Completion:
        """Return the answer to a request; a retry gets the answer that is ready or in flight."""
        asked = name_of(request, await read_body(request, self._max_body_bytes))
        delivery = session.deliveries.again(request, asked)
        if delivery is None:
            delivery = session.deliveries.begin(asked, session.answer(call))
        return await while_connected(request, delivery.answer())

    async def _begun(
        self, request: Request, session: AgentSession, call: AgentCall, live: LiveAnswer
    ) -> "asyncio.Task[Completion]":
        """Begin to answer a request with a stream; see `_answered`."""
        asked = name_of(request, await read_body(request, self._max_body_bytes))
        delivery = session.deliveries.again(request, asked)
        if delivery is not None and not delivery.working.done():
            # The stream's reader has disconnected and retries: the stream cannot be read again from its start.
            delivery.working.cancel()
            await asyncio.wait({delivery.working})
            delivery = session.deliveries.again(request, asked)
        if delivery is None:
            return session.deliveries.begin(asked, session.answer(call, live)).working
        return asyncio.create_task(session.tell_again(call, delivery.working.result(), live))

    async def _streamed(
        self, request: Request, session: AgentSession, call: AgentCall, api: "_StreamApi"
    ) -> Response:
        """Return a stream that starts with the reply's first words; an earlier failure has its own HTTP status."""
        live = LiveAnswer()
        working = await self._begun(request, session, call, live)
        working.add_done_callback(live.close)
        try:
            await while_connected(request, live.started())
            if working.cancelled():
                # Not 409: clients ask once more at that, and would take the answer from each other.
                raise ApiError(400, "this was asked for again, and is answered there", "asked_again")
            if working.done():
                working.result()
        except BaseException:
            working.cancel()
            raise
        assert live.answer is not None
        events = api.events(call, live.answer, self._sessions.model)

        def ended(answer: Completion) -> Iterable[Event]:
            api.keep(session, call, answer)
            return events.ends(answer, self._texts(session, call, answer))

        headers = _headers(live.answer) | {"cache-control": "no-cache"}
        return EventStream(
            working,
            live,
            events,
            ended=ended,
            failed=as_api_error,
            write=api.write,
            last=api.last,
            headers=headers,
        )

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: list the one model that the endpoint serves."""
        self._session(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`: any name is the policy's."""
        self._session(request)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self._sessions.model, "object": "model", "created": 0, "owned_by": "rollgym"}

    def _texts(self, session: AgentSession, call: AgentCall, answer: Completion) -> Mapping[int, str]:
        if call.logprobs:
            text = session.service.renderer.renderer.token_text
            for token in {each for choice in answer.choices for each in choice.sampled.token_ids}:
                if token not in self._token_text:
                    self._token_text[token] = text(token)
        return self._token_text

    # -- the episode

    async def reward(self, request: Request) -> Response:
        """`POST /s/KEY/reward`: of the episode, or of one request (`call`). What is posted last counts."""
        session = self._session(request)
        body = await self._json(request, numbers_of_python=True)
        posted = session.posted
        call = whole(body, "call", 0)
        if call is not None and call not in session.turns_of:
            raise ApiError(404, f"there was no call {call} in this session", "unknown_call", "call")
        value = finite(body.get("reward"))
        if value is None or abs(value) > LARGEST:
            posted.faults.add(call)
            raise ApiError(
                400, f"reward must be a finite number of at most {LARGEST:g}", "invalid_number", "reward"
            )
        if not isinstance(body.get("success"), bool | None):
            raise invalid("success must be true or false", "success")
        posted.faults.discard(call)
        if call is not None:
            posted.turns[call] = value
        else:
            posted.reward = value
        if body.get("success") is not None:
            posted.success = body["success"]
        return JSONResponse({"reward": value})

    async def end(self, request: Request) -> Response:
        """`POST /s/KEY/end`: the agent is done; a reward may come with it."""
        session = self._session(request)
        if await read_body(request, self._max_body_bytes):
            await self.reward(request)
        session.end()
        self._sessions.posted(request.path_params["key"])
        return JSONResponse({"ended": True})

    async def env(self, request: Request) -> Response:
        """`GET /s/KEY/env`: what the environment tells and shows now."""
        environment = self._environment(request)
        shown = {
            "env_id": environment.env_id,
            "instruction": environment.instruction,
            "tools": [dict(tool) for tool in environment.tools],
        }
        return json_answer(shown | environment.seen.as_body())

    async def step(self, request: Request) -> Response:
        """`POST /s/KEY/env/step`: send an action to the environment."""
        environment = self._environment(request)
        action = (await self._json(request)).get("action")
        if not isinstance(action, str):
            raise invalid("action must be text", "action")
        seen = await asyncio.shield(asyncio.ensure_future(environment.step(action)))
        return json_answer(seen.as_body())

    async def mcp(self, request: Request) -> Response:
        """`POST /s/KEY/mcp`: offer the environment's tools over the Model Context Protocol."""
        environment = self._environment(request)
        if request.method == "DELETE":
            return Response(status_code=204)
        if request.method == "GET":  # a stream of what is said unasked, which is nothing
            return Response(status_code=405, headers={"Allow": "POST, DELETE"})
        answer = await mcp_answer(environment, await self._json(request))
        return Response(status_code=202) if answer is None else json_answer(answer)

    # -- requests

    def _session(self, request: Request) -> AgentSession:
        key = request.path_params.get("key")
        if key is None:
            key = _key_of(request)
            if not key:
                raise ApiError(
                    401,
                    "no session: give its key as the API key, or its address (/s/KEY/v1) as the base URL",
                    "invalid_api_key",
                )
            try:
                return self._sessions.session(key)
            except ApiError as error:
                if error.status == 404:
                    raise ApiError(401, "the API key is that of no session", "invalid_api_key") from error
                raise
        return self._sessions.session(key)

    def _environment(self, request: Request) -> EpisodeEnvironment:
        self._session(request).require_open()
        environment = self._sessions.environment(request.path_params["key"])
        if environment is None:
            raise ApiError(404, "this session has no environment", "no_environment")
        return environment

    async def _json(self, request: Request, *, numbers_of_python: bool = False) -> dict[str, Any]:
        return await read_json(request, self._max_body_bytes, numbers_of_python=numbers_of_python)


def _key_of(request: Request) -> str:
    """Return the API key: OpenAI's libraries send it as a bearer token, Anthropic's in a header of its own."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" and key else request.headers.get("x-api-key", "")


def _headers(answer: Completion) -> dict[str, str]:
    headers = {_CALL_HEADER: str(answer.number)}
    if answer.ignored:
        headers[_IGNORED_HEADER] = ", ".join(answer.ignored)
    return headers


def _chunk(event: Event) -> bytes:
    return b"data: " + packed(event) + b"\n\n"


def _named_event(event: Event) -> bytes:
    return f"event: {event['type']}\n".encode() + _chunk(event)


def _keep_conversation(session: AgentSession, call: AgentCall, answer: Completion) -> None:
    said = message_of(answer.choices[0].sampled)
    # Instructions are those of one request, not of the conversation.
    own = call.messages[1:] if call.echoed.get("instructions") is not None else call.messages
    session.conversations[answer.identifier] = [*own, said]


def _keep_nothing(session: AgentSession, call: AgentCall, answer: Completion) -> None:
    """Clients of this API send the whole conversation."""


@dataclass(frozen=True, slots=True)
class _StreamApi:
    """How one of the APIs streams.

    Attributes:
        events: Makes the events of an answer.
        write: Writes one.
        last: Written after all events.
        keep: Keeps what a later request may name.
    """

    events: Callable[
        [AgentCall, Completion, str], ChatChunks | CompletionChunks | ResponseEvents | MessageEvents
    ]
    write: Callable[[Event], bytes]
    last: bytes
    keep: Callable[[AgentSession, AgentCall, Completion], None]


_CHAT = _StreamApi(ChatChunks, _chunk, b"data: [DONE]\n\n", _keep_nothing)
_COMPLETIONS = _StreamApi(CompletionChunks, _chunk, b"data: [DONE]\n\n", _keep_nothing)
_MESSAGES = _StreamApi(MessageEvents, _named_event, b"", _keep_nothing)
_RESPONSES = _StreamApi(ResponseEvents, _named_event, b"", _keep_conversation)
