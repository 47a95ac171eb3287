"""The Model Context Protocol over streamable HTTP: an environment at a URL, a session here for each MCP session.

An MCP session has the id of its session here. The id contains the owner, so any I/O process and any gateway can
answer, and this module keeps no state: it reads the tools from the answer of the episode's reset, which it requests
again. The OpenAPI document gets a description of the messages from here, since the routes of calls have none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError, codes_of
from rollgym.clients.protocol.frames import MEDIA_TYPES, dumps, loads
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.negotiation import answer, problem_answer, read_value
from rollgym.env_server.common.requests import as_problem, invalid, validate
from rollgym.env_server.http.openapi import MAKES, RUNS, problems
from rollgym.env_server.http.transport.connection import CAME
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.mcp_forms import (
    BATCHING,
    CANCELLED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    RESET,
    STEP,
    VERSIONS,
    McpReset,
    McpStep,
    McpToolCall,
    begun_result,
    error_message,
    failed_result,
    initialize_result,
    is_request_id,
    listed_tools,
    problem_message,
    result_message,
    step_result,
    version_message,
)
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.protocols.tools import OpenEnvTools, SessionTools, reset_request_id

MCP_PATH = "/mcp/{env_id}"
"""The path under which each environment is an MCP server."""

MCP_METHODS = ("POST", "DELETE")
"""The methods that it answers there."""

_JSON = MEDIA_TYPES[False]
_ID = {"type": ["string", "integer", "null"]}
_MESSAGE = {
    "type": "object",
    "title": "McpMessage",
    "description": "A message of JSON-RPC 2.0; one without an id is a notification.",
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer"]},
        "method": {
            "type": "string",
            "description": "initialize, ping, tools/list or tools/call; notifications are taken and not answered.",
        },
        "params": {"type": "object", "description": "As the revision of MCP has them."},
    },
    "required": ["jsonrpc", "method"],
}
_RESULT = {
    "type": "object",
    "properties": {"jsonrpc": {"const": "2.0"}, "id": _ID, "result": {"type": "object"}},
    "required": ["jsonrpc", "id", "result"],
}
_ERROR = {
    "type": "object",
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": _ID,
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "data": {"description": "A problem of this server, or what MCP says belongs here."},
            },
            "required": ["code", "message"],
        },
    },
    "required": ["jsonrpc", "id", "error"],
}
_SESSION_PARAMETER = {
    "name": "Mcp-Session-Id",
    "in": "header",
    "schema": {
        "type": "string",
        "description": "The session that `initialize` has begun; its id is that of ours.",
    },
}
_PATH = {
    "name": "env_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": IDENTIFIER},
}
_POSTED = {
    "operationId": "post_mcp",
    "summary": "MCP: a message over streamable HTTP",
    "parameters": [
        _PATH,
        {
            "name": "kwargs",
            "in": "query",
            "schema": {"type": "string", "description": "Kwargs of the environment, as a JSON object."},
        },
        {
            "name": "seed",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0, "description": "Of the first episode."},
        },
        _SESSION_PARAMETER,
        {
            "name": "MCP-Protocol-Version",
            "in": "header",
            "schema": {
                "type": "string",
                "enum": list(VERSIONS),
                "description": "The revision that is spoken.",
            },
        },
    ],
    "requestBody": {"required": True, "content": {_JSON: {"schema": _MESSAGE}}},
}


_POSTED_TO_OPENENV = {
    "operationId": "post_openenv_mcp",
    "summary": "OpenEnv and MCP: a JSON-RPC message",
    "description": "With `initialize` or the header `Mcp-Session-Id` it is one of MCP's, otherwise of OpenEnv's: "
    "`openenv/session/create`, `openenv/session/close`, `tools/list` or `tools/call`, with the session in "
    "`params.session_id`, and the answer is 200 whatever it says. See docs/other_protocols.md.",
}
_SESSION = "Mcp-Session-Id"
_VERSION = "mcp-protocol-version"
_QUERY = frozenset({"kwargs", "seed"})
_MOST_IN_BATCH = 100
_SEEDS = 2**53
_SEED_DIGITS = len(str(_SEEDS))


def described_mcp(*, openenv: bool = False) -> dict[str, Any]:
    """MCP's calls, by their methods.

    Args:
        openenv: Whether to describe OpenEnv's path, where messages need no session.
    """
    codes = MAKES | RUNS | codes_of(lambda problem: problem.told_to_agents) | {"unknown_env"}
    answers: dict[str, Any] = {
        "200": {
            "description": "The result of a request, or an error that its client can mend",
            "headers": {
                "Mcp-Session-Id": {"description": "After `initialize`", "schema": {"type": "string"}}
            },
            "content": {_JSON: {"schema": {"anyOf": [_RESULT, _ERROR]}}},
        },
        "202": {"description": "A notification, or an answer to what nobody asked"},
        "400": {
            "description": "No message that can be read, no session, or a revision that is not spoken",
            "content": {_JSON: {"schema": _ERROR}},
        },
    }
    for status, problem in problems(*codes).items():
        answers[str(status)] = problem | {"content": {_JSON: {"schema": _ERROR}} | problem["content"]}
    ends = {str(status): problem for status, problem in problems("unknown_session", "session_gone").items()}
    posted = {**_POSTED, **(_POSTED_TO_OPENENV if openenv else {})}
    name = "delete_openenv_mcp" if openenv else "delete_mcp"
    return {
        "post": {**posted, "responses": dict(sorted(answers.items()))},
        "delete": {
            "operationId": name,
            "summary": "MCP: the end of a session",
            "parameters": [_PATH, _SESSION_PARAMETER | {"required": True}],
            "responses": {"204": {"description": "It has ended"}, **ends},
        },
    }


@dataclass(frozen=True, slots=True)
class _Client:
    """The caller, the environment and the session that the messages of one HTTP request share."""

    context: Context
    tools: SessionTools
    request: Request
    env_id: str
    session_id: str
    version: str | None


class _Answer(NamedTuple):
    """The answer to one message; there is none to a notification."""

    message: dict[str, Any] | None
    status: int = 200
    headers: Mapping[str, str] = {}


class McpAdapter:
    """Answers MCP's requests.

    Args:
        services: Carries out the operations.
        openenv: Whether it answers at OpenEnv's path, whose clients send messages without a session in the headers.
    """

    def __init__(self, services: Services, *, openenv: bool = False) -> None:
        self._services = services
        self._operations = services.operations
        self._limit = services.settings.max_reply_bytes
        self._openenv = openenv

    async def respond(self, request: Request, headers: Mapping[str, str]) -> Response:
        """Answer one HTTP request.

        Args:
            request: The request, at an environment's path.
            headers: By their names in lower case.

        Raises:
            ProblemError: It is not allowed, or no message can be read from it.
        """
        waited_s = self._services.overload.excess_s(request.scope.get(CAME))
        caller = self._services.tokens.from_headers(headers)
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token, in the Authorization header")
        caller.require("play")
        traceparent = headers.get("traceparent") if self._services.keeps_traces else None
        context = Context(caller, binary=False, traceparent=traceparent)
        context.waited_s = waited_s
        # Answers are looked into here.
        context.fragments = False
        env_id = request.scope["path_params"]["env_id"]
        tools = SessionTools(self._operations, env_id)
        session_id = headers.get(_SESSION.lower(), "")
        client = _Client(context, tools, request, env_id, session_id, headers.get(_VERSION))
        method = request.scope["method"]
        if method == "DELETE":
            return await self._delete(client)
        if method != "POST":
            # A client may open a stream for messages that the server starts, but this server starts none.
            return Response(status_code=405, headers={"Allow": ", ".join(MCP_METHODS)})
        return await self._post(client, headers)

    async def _delete(self, client: _Client) -> Response:
        if not client.session_id:
            raise invalid(_SESSION, "the header says which session ends")
        try:
            await _check_session(client)
        except ProblemError as problem:
            if problem.code != "session_gone":
                raise
            # MCP has one status for every session that is not there.
            raise ProblemError("unknown_session", problem.detail) from None
        await operate(self._operations, client.context, "close", {"session_ids": [client.session_id]})
        return Response(status_code=204)

    async def _post(self, client: _Client, headers: Mapping[str, str]) -> Response:
        for_openenv = OpenEnvTools(self._services, client.env_id, client.context) if self._openenv else None
        try:
            content = await read_value(client.request, headers, self._services.settings.max_request_bytes)
        except ProblemError as problem:
            if problem.code != "invalid_request":
                raise
            # OpenEnv answers every message with 200; its clients look at no other answer.
            return self._say(error_message(None, PARSE_ERROR, problem.detail), 200 if self._openenv else 400)
        if for_openenv is not None and not client.session_id and not _is_mcps(content):
            return self._say(await for_openenv.answer(content))
        if client.version is not None and client.version not in VERSIONS:
            message_id = content.get("id") if isinstance(content, dict) else None
            return self._say(version_message(message_id, client.version), 400)
        if isinstance(content, list):
            return await self._answer_batch(client, content)
        said = await self._answer(client, content)
        if said.message is None:
            return Response(status_code=said.status)
        try:
            response = self._say(said.message, said.status)
        except ProblemError:
            if (session_id := said.headers.get(_SESSION)) is not None:
                # No client would know the session.
                self._operations.end(client.context, session_id)
            raise
        response.headers.update(said.headers)
        return response

    async def _answer_batch(self, client: _Client, messages: list[Any]) -> Response:
        """Answer several messages in their order, as the first revision has them."""
        fault = None
        if client.version not in (None, BATCHING):
            fault = f"revision {client.version} of MCP has no batches"
        elif not 0 < len(messages) <= _MOST_IN_BATCH:
            fault = f"a batch has 1 to {_MOST_IN_BATCH} messages, not {len(messages)}"
        if fault is not None:
            return self._say(error_message(None, INVALID_REQUEST, fault), 400)
        answers = []
        for message in messages:
            if isinstance(message, dict) and message.get("method") == "initialize":
                text = "initialize is no part of a batch"
                said = _Answer(error_message(message.get("id"), INVALID_REQUEST, text))
            else:
                said = await self._answer(client, message)
            if said.status == 404:
                # The session has ended: there is one answer to that.
                return self._say(said.message, 404)
            if said.message is not None:
                answers.append(said.message)
        return self._say(answers) if answers else Response(status_code=202)

    async def _answer(self, client: _Client, message: Any) -> _Answer:
        """The answer to one message, whatever is wrong with it."""
        if not isinstance(message, dict):
            return _malformed("a message is a JSON-RPC 2.0 object with a method")
        message_id, method = message.get("id"), message.get("method")
        is_answer = method is None and ("result" in message or "error" in message)
        if not is_answer and (message.get("jsonrpc") != "2.0" or not isinstance(method, str)):
            return _malformed("a message is a JSON-RPC 2.0 object with a method")
        is_request = not is_answer and "id" in message
        if is_request and not is_request_id(message_id):
            return _malformed("the id of a request is text or a whole number of at most 64 bits")
        params = message.get("params", {})
        if is_request and not isinstance(params, dict):
            return _Answer(error_message(message_id, INVALID_PARAMS, "params must be an object"), 400)
        try:
            if client.session_id and method != "initialize":
                # To each message of a session that has ended: its client has to learn that, whatever it says.
                await _check_session(client)
            if is_request:
                return await self._answer_request(client, message["id"], str(method), params)
            if method == CANCELLED and isinstance(params, dict):
                await self._cancel(client, params.get("requestId"))
            return _Answer(None, 202)
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this message, not the server
            failure = as_problem(error)
        finally:
            client.context.call_id = None
        self._services.metrics.problems[failure.code] += 1
        # MCP's clients treat an ended session as one that is not found: they begin another.
        status = 404 if failure.code == "session_gone" else failure.status
        wait = problem_answer(failure).headers.get("retry-after")
        headers = {} if wait is None else {"Retry-After": wait}
        return _Answer(problem_message(message_id if is_request else None, failure), status, headers)

    async def _answer_request(
        self, client: _Client, message_id: str | int, method: str, params: Mapping[str, Any]
    ) -> _Answer:
        if method == "ping":
            return _Answer(result_message(message_id, {}))
        if method == "initialize":
            kwargs, seed = _query(client.request)
            session_id, begun = await client.tools.begin(client.context, kwargs=kwargs, seed=seed)
            result = initialize_result(params, client.env_id, begun)
            return _Answer(result_message(message_id, result), headers={_SESSION: session_id})
        if method not in ("tools/list", "tools/call"):
            return _Answer(error_message(message_id, METHOD_NOT_FOUND, "there is no such method here"))
        if not client.session_id:
            text = f"the header {_SESSION} is missing: initialize first"
            return _Answer(error_message(message_id, INVALID_REQUEST, text), 400)
        if method == "tools/list":
            begun = await client.tools.begun(client.context, client.session_id)
            tools = listed_tools(begun["info"], await client.tools.described(client.context))
            return _Answer(result_message(message_id, {"tools": tools}))
        call = validate(McpToolCall, params)
        client.context.call_id = _call_id(message_id)
        try:
            called = await self._call(client, call)
        except ProblemError as problem:
            called = failed_result(problem)
            if called is None:
                raise
        if called is None:
            text = f"there is no tool {call.name[:100]!r}"
            return _Answer(error_message(message_id, INVALID_PARAMS, text))
        return _Answer(result_message(message_id, called))

    async def _call(self, client: _Client, call: McpToolCall) -> dict[str, Any] | None:
        """Call a tool; None if no tool has that name."""
        context, session_id = client.context, client.session_id
        if call.name == RESET:
            wanted = validate(McpReset, call.arguments)
            session = await client.tools.find(context, session_id)
            begin = {
                "session_id": session_id,
                "seed": wanted.seed,
                "options": wanted.options,
                "request_id": reset_request_id(_next_episode(session)),
            }
            return begun_result(await operate(self._operations, context, "reset", begin))
        if call.name == STEP:
            action = validate(McpStep, call.arguments).action
            return step_result(await step_by_text(self._operations, context, session_id, action))
        reply = await client.tools.call(context, session_id, call.name, call.arguments)
        return None if reply is None else step_result(reply)

    async def _cancel(self, client: _Client, message_id: Any) -> None:
        """Cancel a call that runs on the session, in whichever process; a call that has ended is not an error."""
        if client.session_id and is_request_id(message_id):
            client.context.call_id = _call_id(message_id)
            await operate(self._operations, client.context, "cancel", {"session_id": client.session_id})

    def _say(self, content: Any, status: int = 200) -> Response:
        return answer(content, binary=False, limit=self._limit, status=status)


async def _check_session(client: _Client) -> None:
    """Find the session that the headers name.

    Raises:
        ProblemError: `unknown_session` or `session_gone`.
    """
    if re.fullmatch(IDENTIFIER, client.session_id) is None:
        raise ProblemError("unknown_session", f"{client.session_id[:100]!r} is no id of a session")
    await client.tools.find(client.context, client.session_id)


def _is_mcps(content: Any) -> bool:
    """Whether a message without a session is one that only MCP's own clients send."""
    method = content.get("method") if isinstance(content, dict) else None
    return method == "initialize" or (isinstance(method, str) and method.startswith("notifications/"))


def _malformed(text: str) -> _Answer:
    return _Answer(error_message(None, INVALID_REQUEST, text), 400)


def _call_id(message_id: str | int) -> str:
    """The id of a call within the server: JSON distinguishes 1 from "1"."""
    return dumps(message_id, binary=False).decode()


def _next_episode(session: Mapping[str, Any]) -> int:
    return 0 if session["episode"] is None else session["episode"] + 1


def _query(request: Request) -> tuple[dict[str, Any] | None, int | None]:
    """The kwargs and the seed of a URL."""
    fields = request.query_params
    for name in fields.keys() - _QUERY:
        raise invalid(name, f"a URL of MCP takes no such query, only {' and '.join(sorted(_QUERY))}")
    kwargs, seed = fields.get("kwargs"), fields.get("seed")
    if seed is not None and not (
        seed.isascii() and seed.isdigit() and len(seed) <= _SEED_DIGITS and int(seed) < _SEEDS
    ):
        raise invalid("seed", "a whole number from 0 below 2**53")
    if kwargs is None:
        return None, None if seed is None else int(seed)
    try:
        read = loads(kwargs, binary=False)
    except DecodeError as error:
        raise invalid("kwargs", str(error)) from error
    if not isinstance(read, dict):
        raise invalid("kwargs", "must be a JSON object")
    return read, None if seed is None else int(seed)
