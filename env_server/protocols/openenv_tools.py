"""Tools as OpenEnv's clients list and call them: JSON-RPC messages over HTTP and sockets, and actions of their kind."""

from collections.abc import Mapping
from typing import Any

from rollgym.env_server.access.context import Context
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.messages.validation import validate
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.mcp_forms import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    McpStep,
    McpToolCall,
    ended_text,
    error_message,
    is_request_id,
    own_tools,
    result_message,
    seen_text,
)
from rollgym.env_server.protocols.openenv_forms import (
    ACT,
    OpenEnvSessionClose,
    OpenEnvSessionCreate,
    act_tool,
    rpc_problem,
    tool_result,
)
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.protocols.session_tools import SessionTools
from rollgym.env_server.sessions.replies import Reply

_CREATE, _CLOSE = "openenv/session/create", "openenv/session/close"


class OpenEnvTools:
    """Lists and calls the tools of one environment for one client.

    OpenEnv reserves the names `reset` and `step`: the agent calls tools, and the trainer begins episodes. So this list
    has no tool `reset`, and the one that takes any action is called `take_action`.

    Args:
        services: Carries out the operations.
        env_id: The environment.
        context: The caller.
    """

    def __init__(self, services: Services, env_id: str, context: Context) -> None:
        self._services = services
        self._operations = services.operations
        self._context = context
        self._tools = SessionTools(services.operations, env_id)

    async def answer(self, message: Any, session_id: str | None = None) -> dict[str, Any]:
        """Answer a JSON-RPC message.

        Args:
            message: The message.
            session_id: The session of the socket that it came over; over HTTP the message names one, or has an
                environment of its own that ends with the answer.

        Returns:
            A JSON-RPC response, whatever is wrong.
        """
        message_id = message.get("id") if isinstance(message, dict) else None
        fault = _fault(message)
        if fault is not None:
            shown = message_id if is_request_id(message_id) else None
            return error_message(shown, INVALID_REQUEST, f"Invalid request: {fault}")
        try:
            return await self._answer(message_id, message["method"], message.get("params", {}), session_id)
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this message, not the server
            problem = as_problem(error)
        self._services.metrics.problems[problem.code] += 1
        return rpc_problem(message_id, problem)

    async def list(self, session_id: str) -> list[dict[str, Any]]:
        """The tools of a session's episode, as OpenEnv's observations list them.

        Raises:
            ProblemError: Any of the protocol's problems.
        """
        begun = await self._tools.begun(self._context, session_id)
        own = own_tools(begun["info"])
        described = await self._tools.described(self._context)
        tools = [*own.values(), *(() if ACT in own else (act_tool(described, has_tools=bool(own)),))]
        return [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["inputSchema"]}
            for tool in tools
        ]

    async def call(self, session_id: str, name: str, arguments: Mapping[str, Any]) -> Reply | None:
        """Call a tool.

        Returns:
            The answer to the step that the call made; None if the tool does not exist.

        Raises:
            ProblemError: Any of a step's problems; `invalid_request`, if the arguments are not the tool's.
        """
        reply = await self._tools.call(self._context, session_id, name, arguments)
        if reply is None and name == ACT:
            action = validate(McpStep, dict(arguments)).action
            return await step_by_text(self._operations, self._context, session_id, action)
        return reply

    async def _answer(
        self, message_id: Any, method: str, params: Mapping[str, Any], session_id: str | None
    ) -> dict[str, Any]:
        if method == "ping":
            return result_message(message_id, {})
        if method == _CREATE:
            created = session_id or await self._create(params)
            return result_message(message_id, {"session_id": created})
        if method == _CLOSE:
            return await self._close(message_id, params, session_id)
        if method not in ("tools/list", "tools/call"):
            return error_message(message_id, METHOD_NOT_FOUND, f"Method not found: {method[:100]}")
        call = validate(McpToolCall, params) if method == "tools/call" else None
        if session_id is None and (named := params.get("session_id")):
            session_id = str((await self._tools.find(self._context, named))["session_id"])
        if session_id is not None:
            return await self._run(message_id, call, session_id)
        session_id, _ = await self._tools.begin(self._context, kwargs=None)
        try:
            return await self._run(message_id, call, session_id)
        finally:
            self._operations.end(self._context, session_id)

    async def _run(self, message_id: Any, call: McpToolCall | None, session_id: str) -> dict[str, Any]:
        if call is None:
            tools = [{**tool, "inputSchema": tool["input_schema"]} for tool in await self.list(session_id)]
            return result_message(message_id, {"tools": tools})
        reply = await self.call(session_id, call.name, call.arguments)
        if reply is None:
            return error_message(message_id, INVALID_PARAMS, f"Tool not found: {call.name[:100]}")
        return result_message(message_id, tool_result(seen_text(reply) + ended_text(reply), reply))

    async def _create(self, params: Mapping[str, Any]) -> str:
        wanted = validate(OpenEnvSessionCreate, params)
        session_id, _ = await self._tools.begin(self._context, kwargs=wanted.kwargs, seed=wanted.seed)
        return session_id

    async def _close(
        self, message_id: Any, params: Mapping[str, Any], session_id: str | None
    ) -> dict[str, Any]:
        named = validate(OpenEnvSessionClose, params).session_id
        if named == session_id:
            text = "the session of a socket ends with the socket"
            return error_message(message_id, INVALID_REQUEST, text)
        await self._tools.find(self._context, named)
        await operate(self._operations, self._context, "close", {"session_ids": [named]})
        return result_message(message_id, {"session_id": named, "closed": True})


def _fault(message: Any) -> str | None:
    """The reason why a message is not a JSON-RPC request, as OpenEnv reads it."""
    if not isinstance(message, dict):
        return "a message must be an object"
    if message.get("jsonrpc") != "2.0":
        return 'jsonrpc must be "2.0"'
    if not isinstance(message.get("method"), str):
        return "method must be text"
    if not isinstance(message.get("params", {}), dict):
        return "params must be an object"
    if message.get("id") is not None and not is_request_id(message["id"]):
        return "id must be text or a whole number"
    return None
