"""What FastAPI's description of the calls lacks: problems, MessagePack, pages and sockets."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from starlette.routing import BaseRoute

from rollgym.clients.protocol.errors import CODES, RETRY_LATER
from rollgym.clients.protocol.frames import MEDIA_TYPES
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.env_server.messages.negotiation import PROBLEM_MEDIA_TYPE
from rollgym.version import __version__

ON_SESSION = ("unknown_session", "session_gone", "draining")
RUNS = (*ON_SESSION, "busy", "not_reset", "env_error", "step_timeout", "upstream_error")
MAKES = ("at_capacity", "draining", "env_error", "step_timeout", "upstream_error", "invalid_kwargs")

_SCHEMAS = "#/components/schemas/"
_ALWAYS = (
    "internal",
    "invalid_request",
    "rate_limited",
    "too_large",
    "unauthorized",
    "forbidden",
    "unsupported_media_type",
)


class Problem(BaseModel):
    """A failure (RFC 9457); `code` is what programs look at, and further members depend on it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str


def problems(*codes: str, always: Iterable[str] = _ALWAYS) -> dict[int | str, dict[str, Any]]:
    """The answers of a call that are problems, by their status, for its route's `responses`.

    Args:
        *codes: What it may be answered with.
        always: What every call may be answered with beside these.
    """
    by_status: dict[int, list[str]] = {}
    for code in (*always, *codes):
        by_status.setdefault(CODES[code], []).append(code)
    described: dict[int | str, dict[str, Any]] = {}
    for status, names in sorted(by_status.items()):
        described[status] = {
            "description": " or ".join(f"`{name}`" for name in sorted(names)),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
        }
        if not RETRY_LATER.isdisjoint(names):
            described[status]["headers"] = {
                "Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}
            }
    return described


def describe(
    routes: list[BaseRoute],
    sockets: Mapping[str, str],
    others: Mapping[str, Mapping[str, Any]],
    *,
    needs_token: bool,
) -> dict[str, Any]:
    """The OpenAPI document of a server.

    Args:
        routes: Its calls.
        sockets: What its WebSockets are for, by their paths.
        others: Calls of other protocols, described by their methods, by their paths.
        needs_token: Whether it has tokens.
    """
    document = get_openapi(
        title="rollgym environment server",
        version=__version__,
        description="Environments over HTTP. The same operations go over one WebSocket at /v1/ws.",
        routes=routes,
        separate_input_output_schemas=False,
    )
    schemas = document["components"]["schemas"]
    schemas["Problem"] = Problem.model_json_schema()
    schemas["Problem"]["properties"]["code"]["enum"] = sorted(CODES)
    for methods in document["paths"].values():
        for described in methods.values():
            if (body := described.get("requestBody")) is not None:
                name = body["content"][MEDIA_TYPES[False]]["schema"]["$ref"].removeprefix(_SCHEMAS)
                body["required"] = "required" in schemas[name]
            for each in (body, *described["responses"].values()):
                if each is not None and (content := each.get("content", {})).keys() == {MEDIA_TYPES[False]}:
                    content[MEDIA_TYPES[True]] = content[MEDIA_TYPES[False]]
    refused = {
        str(status): each
        for status, each in problems("internal", "unauthorized", "forbidden", always=()).items()
    }
    answers = {"101": {"description": "Switching protocols"}, **refused}
    document["paths"] |= {
        "/health": _page("Whether the server lives", "application/json"),
        "/ready": _page("Whether the server takes new sessions", "application/json"),
        "/metrics": _page("Prometheus metrics (role admin)", "text/plain"),
        "/openapi.json": _page("This document", "application/json"),
        "/docs": _page("This document for people", "text/html"),
        **{path: {"get": _socket(path, what) | {"responses": answers}} for path, what in sockets.items()},
        **others,
    }
    document["paths"]["/ready"]["get"]["responses"]["503"] = {"description": "Starting or draining"}
    document["paths"]["/metrics"]["get"]["responses"] |= refused
    del document["paths"]["/metrics"]["get"]["security"]
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}] if needs_token else []
    return document


def _socket(path: str, what: str) -> dict[str, Any]:
    """A WebSocket, which OpenAPI knows as a GET that goes over to another protocol."""
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": IDENTIFIER}}
        for name in names
    ]
    return {"summary": f"WebSocket: {what}", **({"parameters": parameters} if parameters else {})}


def _page(summary: str, media_type: str) -> dict[str, Any]:
    """A page that needs no token."""
    answers = {"200": {"description": "Done", "content": {media_type: {}}}}
    return {"get": {"summary": summary, "security": [], "responses": answers}}
