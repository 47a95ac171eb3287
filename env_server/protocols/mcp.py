"""The Model Context Protocol over streamable HTTP: an environment at a URL, a session of ours for each of its sessions.

The id of an MCP session is that of our session. So the owner is in the id, any I/O process and any gateway may be
asked, and nothing is kept here: which tools there are is what the episode's reset has answered, which is asked for
again.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.messages.negotiation import answer, problem_answer, read_fields
from rollgym.env_server.messages.validation import invalid, validate
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.mcp_forms import (
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
    call_as_action,
    error_message,
    failed_result,
    initialize_result,
    listed_tools,
    own_tools,
    problem_message,
    result_message,
    step_result,
    version_message,
)
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.sessions.replies import Reply

_SESSION = "Mcp-Session-Id"
_VERSION = "mcp-protocol-version"
_QUERY = frozenset({"kwargs", "seed"})


class McpAdapter:
    """Answers MCP's requests.

    Args:
        services: What does the work.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limit = services.settings.max_reply_bytes

    async def respond(self, request: Request, headers: Mapping[str, str], env_id: str) -> Response:
        """Answer one HTTP request.

        Args:
            request: The request.
            headers: By their names in lower case.
            env_id: The environment at its path.

        Raises:
            ProblemError: It is not allowed, or no message can be read from it.
        """
        caller = self._services.tokens.from_headers(headers)
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token, in the Authorization header")
        caller.require("play")
        traceparent = headers.get("traceparent") if self._services.keeps_traces else None
        context = Context(caller, binary=False, traceparent=traceparent)
        # Answers are looked into here.
        context.fragments = False
        method = request.scope["method"]
        if method == "DELETE":
            return await self._delete(context, headers)
        if method != "POST":
            # A client may ask for a stream of what the server says unasked, which is nothing.
            return Response(status_code=405, headers={"Allow": "POST, DELETE"})
        return await self._post(context, request, headers, env_id)

    async def _delete(self, context: Context, headers: Mapping[str, str]) -> Response:
        session_id = headers.get(_SESSION.lower())
        if session_id is None:
            raise invalid(_SESSION, "the header says which session ends")
        await operate(self._services.operations, context, "close", {"session_ids": [session_id]})
        return Response(status_code=204)

    async def _post(
        self, context: Context, request: Request, headers: Mapping[str, str], env_id: str
    ) -> Response:
        try:
            message = await read_fields(request, headers, self._services.settings.max_request_bytes)
        except ProblemError as problem:
            if problem.code != "invalid_request":
                raise
            return self._say(error_message(None, PARSE_ERROR, problem.detail), 400)
        message_id, method = message.get("id"), message.get("method")
        asked = headers.get(_VERSION)
        if asked is not None and asked not in VERSIONS:
            return self._say(version_message(message_id, asked), 400)
        if method is None and ("result" in message or "error" in message):
            return Response(status_code=202)
        if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
            text = "a message is a JSON-RPC 2.0 object with a method"
            return self._say(error_message(None, INVALID_REQUEST, text), 400)
        if "id" not in message:
            return Response(status_code=202)
        if not isinstance(message_id, str | int) or isinstance(message_id, bool):
            text = "the id of a request is text or a whole number"
            return self._say(error_message(None, INVALID_REQUEST, text), 400)
        params = message.get("params", {})
        if not isinstance(params, dict):
            return self._say(error_message(message_id, INVALID_PARAMS, "params must be an object"), 400)
        try:
            return await self._answer(context, request, headers, env_id, message_id, method, params)
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this message, not the server
            failure = as_problem(error)
        self._services.metrics.problems[failure.code] += 1
        # To MCP's clients a session that is no more is one that is not found: they begin another.
        status = 404 if failure.code == "session_gone" else failure.status
        response = self._say(problem_message(message_id, failure), status)
        if (wait := problem_answer(failure).headers.get("retry-after")) is not None:
            response.headers["Retry-After"] = wait
        return response

    async def _answer(
        self,
        context: Context,
        request: Request,
        headers: Mapping[str, str],
        env_id: str,
        message_id: str | int,
        method: str,
        params: Mapping[str, Any],
    ) -> Response:
        if method == "ping":
            return self._say(result_message(message_id, {}))
        if method == "initialize":
            session_id, result = await self._initialize(context, request, env_id, params)
            try:
                response = self._say(result_message(message_id, result))
            except ProblemError:
                # Nobody would know the session.
                self._services.operations.end(context, session_id)
                raise
            response.headers[_SESSION] = session_id
            return response
        if method not in ("tools/list", "tools/call"):
            return self._say(error_message(message_id, METHOD_NOT_FOUND, "there is no such method here"))
        session_id = headers.get(_SESSION.lower(), "")
        if not session_id:
            text = f"the header {_SESSION} is missing: initialize first"
            return self._say(error_message(message_id, INVALID_REQUEST, text), 400)
        session = await operate(self._services.operations, context, "session", {"session_id": session_id})
        if session["env_id"] != env_id:
            raise ProblemError("unknown_session", f"the session is not one of {env_id}")
        if method == "tools/list":
            begun = await self._begun(context, session)
            described = await operate(self._services.operations, context, "envs", {"env_id": env_id})
            return self._say(result_message(message_id, {"tools": listed_tools(begun["info"], described)}))
        return await self._answer_call(context, session, message_id, validate(McpToolCall, params))

    async def _answer_call(
        self, context: Context, session: Mapping[str, Any], message_id: str | int, call: McpToolCall
    ) -> Response:
        try:
            result = await self._call(context, session, call)
        except ProblemError as problem:
            result = failed_result(problem)
            if result is None:
                raise
        if result is None:
            text = f"there is no tool {call.name[:100]!r}"
            return self._say(error_message(message_id, INVALID_PARAMS, text))
        return self._say(result_message(message_id, result))

    # -- what is asked for -----------------------------------------------------------------------------------------

    async def _initialize(
        self, context: Context, request: Request, env_id: str, params: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Make a session and begin an episode: its reset says which tools there are."""
        kwargs, seed = _query(request)
        operations = self._services.operations
        made = await operate(operations, context, "make", {"env_id": env_id, "kwargs": kwargs})
        session_id = str(made["session_id"])
        begin = {"session_id": session_id, "seed": seed, "request_id": _request_id(0)}
        begun = False
        try:
            reply = await operate(operations, context, "reset", begin)
            begun = True
        finally:
            if not begun:
                operations.end(context, session_id)
        return session_id, initialize_result(params, env_id, reply)

    async def _begun(self, context: Context, session: Mapping[str, Any]) -> Reply:
        """What the reset of a session's episode has answered; none is begun for that, wherever the session is now."""
        again = {"session_id": session["session_id"], "again": True}
        return await operate(self._services.operations, context, "reset", again)

    async def _call(
        self, context: Context, session: Mapping[str, Any], call: McpToolCall
    ) -> dict[str, Any] | None:
        """Call a tool; None where there is none of that name."""
        operations, session_id = self._services.operations, str(session["session_id"])
        if call.name == RESET:
            wanted = validate(McpReset, call.arguments)
            begin = {
                "session_id": session_id,
                "seed": wanted.seed,
                "options": wanted.options,
                "request_id": _request_id((session["episode"] or 0) + 1),
            }
            return begun_result(await operate(operations, context, "reset", begin))
        if call.name == STEP:
            action = validate(McpStep, call.arguments).action
            return step_result(await step_by_text(operations, context, session_id, action))
        info = (await self._begun(context, session))["info"]
        if call.name not in own_tools(info):
            return None
        said = call_as_action(info, call.name, call.arguments)
        return step_result(
            await operate(operations, context, "step", {"session_id": session_id, "action": said})
        )

    def _say(self, message: Mapping[str, Any], status: int = 200) -> Response:
        return answer(message, binary=False, limit=self._limit, status=status)


def _request_id(episode: int) -> str:
    return f"mcp-{episode}"


def _query(request: Request) -> tuple[dict[str, Any] | None, int | None]:
    """The kwargs and the seed of a URL."""
    fields = request.query_params
    for name in fields.keys() - _QUERY:
        raise invalid(name, f"a URL of MCP takes no such query, only {' and '.join(sorted(_QUERY))}")
    kwargs, seed = fields.get("kwargs"), fields.get("seed")
    if seed is not None and not (seed.isascii() and seed.isdigit() and int(seed[:17]) < 2**53):
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
