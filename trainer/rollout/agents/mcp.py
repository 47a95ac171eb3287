"""An episode's environment as tools of the Model Context Protocol, over streamable HTTP without streams.

The agent's session is in the URL, so the protocol's own session ids are not needed, and its episode has begun: there is
no tool that begins another one. Messages are read and built here; nothing here does I/O.
"""

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall, call_format_of, declared_tools
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import written_calls
from rollgym.trainer.rollout.agents.environment import EpisodeEnvironment, Observed
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The revisions that are spoken, the newest first."""
STEP = "step"
_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603
_ACTION = {
    "type": "object",
    "properties": {"action": {"type": "string"}},
    "required": ["action"],
    "additionalProperties": False,
}


class McpError(Exception):
    """A request that is refused, with the code that JSON-RPC has for it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def mcp_answer(environment: EpisodeEnvironment, message: object) -> dict[str, Any] | None:
    """Answer one message; None if no answer is expected."""
    if not isinstance(message, Mapping) or message.get("jsonrpc") != "2.0":
        return _error(None, _INVALID_REQUEST, "a message is a JSON-RPC 2.0 object")
    identifier = message.get("id")
    if identifier is None or "method" not in message:
        return None
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        return _error(None, _INVALID_REQUEST, "the id of a request is text or a whole number")
    params = message.get("params")
    try:
        result = await _result(environment, message["method"], params if isinstance(params, Mapping) else {})
    except McpError as error:
        return _error(identifier, error.code, str(error))
    except ApiError as error:
        if error.status >= 500:
            return _error(identifier, _INTERNAL, error.message)
        result = _said(error.message, failed=True)  # the agent can do otherwise
    return {"jsonrpc": "2.0", "id": identifier, "result": result}


def _error(identifier: str | int | None, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identifier, "error": {"code": code, "message": text}}


async def _result(
    environment: EpisodeEnvironment, method: object, params: Mapping[str, Any]
) -> dict[str, Any]:
    match method:
        case "initialize":
            return _initialized(environment, params)
        case "ping":
            return {}
        case "tools/list":
            return {"tools": listed_tools(environment)}
        case "tools/call":
            return await _called(environment, params)
    raise McpError(_METHOD_NOT_FOUND, "there is no such method here")


def _initialized(environment: EpisodeEnvironment, params: Mapping[str, Any]) -> dict[str, Any]:
    asked = params.get("protocolVersion")
    told = [environment.instruction, environment.seen.text]
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "rollgym", "title": environment.env_id, "version": __version__},
        "instructions": "\n\n".join(filter(None, told)),
    }


def listed_tools(environment: EpisodeEnvironment) -> list[dict[str, Any]]:
    """Return `step`, and the environment's own tools if calls of them can be written in its format."""
    own = [tool for name, tool in _own_tools(environment).items() if name != STEP]
    meaning = "Say something to the environment that is no call of a tool." if own else "Take an action."
    return [{"name": STEP, "description": meaning, "inputSchema": _ACTION}, *own]


def _own_tools(environment: EpisodeEnvironment) -> dict[str, dict[str, Any]]:
    return {
        tool.name: {
            "name": tool.name,
            "description": tool.description,
            "inputSchema": dict(tool.parameters),
        }
        for tool in declared_tools(environment.begun)
    }


async def _called(environment: EpisodeEnvironment, params: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise McpError(_INVALID_PARAMS, "tools/call takes a name and an object of arguments")
    if name == STEP:
        if not isinstance(arguments.get("action"), str):
            raise McpError(_INVALID_PARAMS, "step takes an action, which is text")
        return _shown(await environment.step(arguments["action"]))
    if name not in _own_tools(environment):
        raise McpError(_INVALID_PARAMS, f"there is no tool {name[:100]!r}")
    schemas = {tool.name: tool.parameters for tool in declared_tools(environment.begun)}
    call = ToolCall(name, arguments)
    try:
        action = written_calls(call_format_of(environment.begun), [call], schemas=schemas)
    except UnwritableCallError as error:
        return _said(f"{error}. Nothing was run.", failed=True)
    return _shown(await environment.step(action))


def _shown(seen: Observed) -> dict[str, Any]:
    texts = [message.get("content") for message in seen.messages if message.get("role") == "tool"]
    # Tool results without the marks of a format.
    bare = len(texts) == len(seen.messages) > 0 and all(isinstance(text, str) for text in texts)
    text = "\n".join(map(str, texts)) if bare else seen.text
    if seen.over:
        text += "\n\n[The episode has ended.]"
    return _said(text, failed=not seen.valid)


def _said(text: str, *, failed: bool) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": failed}
