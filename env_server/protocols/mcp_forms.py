"""Converts messages of the Model Context Protocol to and from requests and answers of this server; no I/O."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.clients.protocol.free_form import FreeFields, FreeValue
from rollgym.clients.protocol.messages import Seed
from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.protocols.openenv_forms import META, is_failed_call, value_schema
from rollgym.env_server.sessions.replies import Reply
from rollgym.version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The revisions of the protocol that are spoken, the newest first; all have sessions that `initialize` begins."""

BATCHING = "2025-03-26"
"""The one revision whose clients may send several messages in a list."""

CANCELLED = "notifications/cancelled"
"""The notification that a client no longer waits for the answer to one of its requests."""

RESET, STEP = "reset", "step"
"""The tools that every environment has."""

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
UNSUPPORTED_VERSION = -32022
_OUR_ERROR = -32050


class McpToolCall(BaseModel):
    """The parameters of a `tools/call` request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: FreeFields = Field(default_factory=dict)


class McpReset(BaseModel):
    """The arguments of the tool `reset`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    seed: Seed | None = None
    options: FreeFields | None = None


class McpStep(BaseModel):
    """The arguments of the tool `step`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    action: FreeValue


def is_request_id(value: Any) -> bool:
    """Whether MCP has such ids of requests, text and whole numbers, and an answer can repeat it."""
    return isinstance(value, str) or (type(value) is int and -(1 << 63) <= value < 1 << 64)


def result_message(message_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    return {"jsonrpc": "2.0", "id": message_id, "result": dict(result)}


def error_message(message_id: Any, code: int, text: str, data: Any = None) -> dict[str, Any]:
    """The answer to a request that failed."""
    error = {"code": code, "message": text} if data is None else {"code": code, "message": text, "data": data}
    return {"jsonrpc": "2.0", "id": message_id if is_request_id(message_id) else None, "error": error}


def problem_message(message_id: Any, problem: ProblemError) -> dict[str, Any]:
    """A problem of our protocol, which is in the answer as it is."""
    code = INVALID_PARAMS if problem.status == 422 else _OUR_ERROR
    return error_message(message_id, code, problem.detail, problem.to_problem())


def version_message(message_id: Any, asked: str) -> dict[str, Any]:
    """The answer to a request of a revision that is not spoken."""
    data = {"supported": list(VERSIONS), "requested": asked[:40]}
    return error_message(message_id, UNSUPPORTED_VERSION, "this revision of MCP is not spoken here", data)


def initialize_result(params: Mapping[str, Any], env_id: str, reply: Reply) -> dict[str, Any]:
    """The answer to `initialize`, which has begun an episode.

    Args:
        params: The parameters of the request.
        env_id: The environment.
        reply: The answer to the reset.
    """
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "rollgym", "title": env_id, "version": __version__},
        "instructions": begun_text(reply),
    }


def begun_text(reply: Reply) -> str:
    """The text that an agent receives when an episode begins: the instruction, and the first observation.

    Environments with tools say in `info["rules"]` the part of the instruction that is not about writing calls.
    """
    info = reply["info"]
    instruction = info.get("rules", info.get("instruction"))
    parts = [instruction] if isinstance(instruction, str) and instruction else []
    return "\n\n".join([*parts, _text(reply["observation"])])


def listed_tools(info: Mapping[str, Any], described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All tools of an episode: `reset`, `step`, and the environment's own.

    Args:
        info: The info of the reset.
        described: The environment's `EnvInfo`.
    """
    own = own_tools(info)
    action = value_schema(described["action_space"])
    meaning = "Take an action in the environment."
    if own:
        meaning = (
            "Reply in words, or in any way that the environment understands and that is no call of a tool."
        )
    return [
        {
            "name": RESET,
            "description": "Begin a new episode; equal seeds are equal episodes.",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "seed": {"type": "integer", "minimum": 0, "maximum": 2**53 - 1},
                    "options": {"type": "object", "description": "What this environment's reset takes."},
                },
                "additionalProperties": False,
            },
        },
        {
            "name": STEP,
            "description": meaning,
            "inputSchema": {
                "type": "object",
                "properties": {"action": action},
                "required": ["action"],
                "additionalProperties": False,
            },
        },
        *own.values(),
    ]


def own_tools(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tools that an environment declares in `info["tools"]`, by name; those called as ours are left out."""
    declared = info.get("tools")
    found: dict[str, dict[str, Any]] = {}
    for tool in declared if isinstance(declared, list) else ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        name, schema = function["name"], function.get("parameters")
        if name in (RESET, STEP):
            continue
        found[name] = {
            "name": name,
            "description": str(function.get("description", "")),
            "inputSchema": dict(schema) if isinstance(schema, Mapping) else {"type": "object"},
        }
    return found


def call_as_action(info: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the environment reads calls: in the format that its `info["call_format"]` names, or in the usual one.

    Raises:
        ProblemError: `invalid_request`, if the format has no form for the call.
    """
    form = FORMATS.get(str(info.get("call_format")), FORMATS[DEFAULT_CALL_FORMAT])
    schemas = {each: tool["inputSchema"] for each, tool in own_tools(info).items()}
    try:
        return form.write([ToolCall(name, arguments)], schemas=schemas)
    except UnwritableCallError as error:
        raise invalid("arguments", str(error)) from error


def begun_result(reply: Reply) -> dict[str, Any]:
    """The result of the tool `reset`."""
    return _tool_result(begun_text(reply), reply, is_error=False)


def step_result(reply: Reply) -> dict[str, Any]:
    """The result of a step, whichever tool has taken it."""
    text = seen_text(reply) + ended_text(reply, f" Call {RESET} to begin another.")
    return _tool_result(text, reply, is_error=is_failed_call(reply["info"]))


def ended_text(reply: Reply, then: str = "") -> str:
    """The text that an agent receives after the last observation of an episode; empty if the episode continues."""
    if not (reply["terminated"] or reply["truncated"]):
        return ""
    return f"\n\n[The episode has ended, with a last reward of {reply['reward']}.{then}]"


def failed_result(problem: ProblemError) -> dict[str, Any] | None:
    """The result of a failed call, for the agent; None if the failure concerns the client instead."""
    if not problem.kind.told_to_agents:
        return None
    return _tool_result(problem.detail, {"problem": problem.to_problem()}, is_error=True)


def seen_text(reply: Reply) -> str:
    """The text of a step for an agent: results of tools without the marks that a format puts around them."""
    messages = reply["info"].get("messages")
    if isinstance(messages, list) and messages and all(isinstance(each, Mapping) for each in messages):
        texts = [message.get("content") for message in messages if message.get("role") == "tool"]
        if len(texts) == len(messages) and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    return _text(reply["observation"])


def _tool_result(text: str, reply: Mapping[str, Any], *, is_error: bool) -> dict[str, Any]:
    # The state and the like are for programs: `_meta` is not shown to agents.
    return {
        "content": [{"type": "text", "text": text}],
        "isError": is_error,
        "_meta": {META: dict(reply)},
    }


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else dumps(observation, binary=False).decode()
