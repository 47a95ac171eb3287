"""The tools of a session's environment, for the protocols that list and call tools.

OpenEnv's clients list and call them by JSON-RPC messages, over HTTP and sockets, and by actions of their kind.
"""

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.requests import as_problem, validate
from rollgym.env_server.operations.operations import Calls
from rollgym.env_server.operations.services import Services
from rollgym.env_server.protocols.mcp_forms import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    McpStep,
    McpToolCall,
    call_as_action,
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
from rollgym.env_server.sessions.replies import Reply


class SessionTools:
    """Begins sessions of one environment, and lists and calls the tools that their episodes declare.

    This object keeps no state: it reads the tools from the answer of the episode's reset, which it requests again. So
    any I/O process and any gateway can answer.

    Args:
        operations: Carries out the operations on sessions.
        env_id: The environment.
    """

    def __init__(self, operations: Calls, env_id: str) -> None:
        self._operations = operations
        self._env_id = env_id

    async def begin(
        self, context: Context, *, kwargs: Mapping[str, Any] | None, seed: int | None = None
    ) -> tuple[str, Reply]:
        """Make a session and begin an episode, whose reset declares the tools.

        Returns:
            The session's id, and the answer to the reset.

        Raises:
            ProblemError: The session cannot be made, or its environment cannot be reset; no session is left then.
        """
        made = await operate(self._operations, context, "make", {"env_id": self._env_id, "kwargs": kwargs})
        session_id = str(made["session_id"])
        begin = {"session_id": session_id, "seed": seed, "request_id": reset_request_id(0)}
        begun = False
        try:
            reply = await operate(self._operations, context, "reset", begin)
            begun = True
        finally:
            if not begun:
                self._operations.end(context, session_id)
        return session_id, reply

    async def find(self, context: Context, session_id: str) -> Reply:
        """A session of this environment.

        Raises:
            ProblemError: `unknown_session` or `session_gone`.
        """
        session = await operate(self._operations, context, "session", {"session_id": session_id})
        if session["env_id"] != self._env_id:
            raise ProblemError("unknown_session", f"the session is not one of {self._env_id}")
        return session

    async def described(self, context: Context) -> Reply:
        """The `EnvInfo` of the session's environment."""
        return await operate(self._operations, context, "envs", {"env_id": self._env_id})

    async def begun(self, context: Context, session_id: str) -> Reply:
        """The answer of the reset of a session's episode; this begins no episode.

        Raises:
            ProblemError: `not_reset`, if there has been none, or its answer is not known any more.
        """
        again = {"session_id": session_id, "again": True}
        return await operate(self._operations, context, "reset", again)

    async def call(
        self, context: Context, session_id: str, name: str, arguments: Mapping[str, Any]
    ) -> Reply | None:
        """Call one of the environment's own tools, as a step whose action is the call in the environment's format.

        Returns:
            The answer to the step; None if the environment has no such tool.

        Raises:
            ProblemError: Any of a step's problems; `invalid_request`, if the format cannot hold the arguments.
        """
        info = (await self.begun(context, session_id))["info"]
        if name not in own_tools(info):
            return None
        action = call_as_action(info, name, arguments)
        return await operate(self._operations, context, "step", {"session_id": session_id, "action": action})


def reset_request_id(episode: int) -> str:
    """The request id of the reset that begins an episode, by which its answer can be requested again."""
    return f"tools-{episode}"


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
