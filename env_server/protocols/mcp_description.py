"""MCP in the OpenAPI document, since the routes of calls do not describe its messages."""

from typing import Any

from rollgym.clients.protocol.frames import MEDIA_TYPES
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.clients.protocol.problems import codes_of
from rollgym.env_server.http.openapi import MAKES, RUNS, problems
from rollgym.env_server.protocols.mcp_forms import VERSIONS

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
_SESSION = {
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
        _SESSION,
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
            "parameters": [_PATH, _SESSION | {"required": True}],
            "responses": {"204": {"description": "It has ended"}, **ends},
        },
    }
