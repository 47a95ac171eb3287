"""The description of the HTTP calls for tools and people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from clients.protocol.errors import CODES, RETRY_LATER
from clients.protocol.frames import MEDIA_TYPES
from clients.protocol.messages import IDENTIFIER
from env_server.http.calls import INTERACTIVE_SESSION_PATH, Call
from env_server.messages.negotiation import PROBLEM_MEDIA_TYPE

_REFERENCE = "#/components/schemas/{model}"
_ENCODINGS = (MEDIA_TYPES[False], MEDIA_TYPES[True])


_ALWAYS = (
    "invalid_request",
    "rate_limited",
    "too_large",
    "unauthorized",
    "forbidden",
    "unsupported_media_type",
)
_SESSION = ("unknown_session", "session_gone", "draining")
_RUNS = (*_SESSION, "busy", "not_reset", "env_error", "step_timeout", "upstream_error")
_MAKES = ("at_capacity", "draining", "env_error", "step_timeout", "upstream_error", "invalid_kwargs")
_PROBLEMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "make": (*_MAKES, "unknown_env"),
        "restore": (*_MAKES, "unknown_env", "session_gone"),
        "fork": (*_RUNS, "at_capacity", "fork_unsupported"),
        "step": (*_RUNS, "invalid_action", "episode_over", "step_mismatch"),
        "reset": _RUNS,
        "render": _RUNS,
        "cancel": _SESSION,
        "episode": _SESSION,
        "session": _SESSION,
        "sessions": ("draining",),
        "close": ("draining",),
        "verify": ("unknown_env", "not_stateless", "draining", "env_error", "step_timeout", "upstream_error"),
        "run_code": ("at_capacity", "draining"),
        "sandbox": ("draining",),
        "envs": ("unknown_env", "draining"),
        "info": ("draining",),
        "announce": ("draining",),
        "register": ("env_exists", "spec_mismatch", "probe_failed", "at_capacity", "draining"),
        "heartbeat": ("unknown_registration", "draining"),
        "unregister": ("unknown_registration", "draining"),
        "gem_make": (*_MAKES, "unknown_env"),
        "gem_reset": _RUNS,
        "gem_step": (*_RUNS, "invalid_action", "episode_over"),
        "gem_close": ("draining",),
        "gem_list": ("draining",),
        "openenv_reset": (*_MAKES, "unknown_env"),
        "openenv_step": (*_MAKES, "unknown_env", "invalid_action"),
        **dict.fromkeys(
            ("openenv_state", "openenv_schema", "openenv_metadata", "openenv_health"),
            ("unknown_env", "draining"),
        ),
    }
)
"""The problems that an operation may be answered with beside those of every call, and `internal`."""


class Problem(BaseModel):
    """A failure (RFC 9457); `code` is what programs look at, and further members depend on it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str


def describe_calls(calls: Sequence[Call], *, needs_token: bool) -> dict[str, Any]:
    """The OpenAPI document of calls.

    Args:
        calls: The calls that the server answers.
        needs_token: Whether it has tokens.
    """
    models: list[type[BaseModel]] = [Problem]
    for call in calls:
        models += [model for model in (call.request, *call.replies) if model is not None]
    references, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=_REFERENCE
    )
    schemas = {model: references[model, "validation"] for model in dict.fromkeys(models)}
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _describe(call, schemas)
    paths.update(_other_paths())
    if "/run_code" in paths:
        paths[INTERACTIVE_SESSION_PATH] = {
            "get": _upgrade(
                "WebSocket: an interactive session with a program in the sandbox (docs/run_code.md)"
            )
        }
    components = definitions["$defs"]
    components["Problem"]["properties"]["code"]["enum"] = sorted(CODES)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollgym environment server",
            "version": version("rollgym"),
            "description": "Environments over HTTP. The same operations go over one WebSocket at /v1/ws.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if needs_token else [],
    }


def _describe(call: Call, schemas: dict[type[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Done"}
    if call.replies:
        found = [schemas[model] for model in call.replies]
        good["content"] = _content(found[0] if len(found) == 1 else {"anyOf": found})
    elif not call.empty:
        good["content"] = _content({"type": "object"})
    described: dict[str, Any] = {
        "operationId": f"{call.method.lower()}_{call.op}" + ("_one" if call.parameters else ""),
        "summary": call.summary,
        "parameters": list(_parameters(call)),
        "responses": {
            str(call.status): good,
            **_problems((*_ALWAYS, *_PROBLEMS[call.op]), schemas[Problem]),
        },
    }
    if call.role is None:
        described["security"] = []
    if call.request is not None:
        required = any(field.is_required() for field in call.request.model_fields.values())
        described["requestBody"] = {"required": required, "content": _content(schemas[call.request])}
    return described


def _problems(codes: Iterable[str], schema: dict[str, Any]) -> dict[str, Any]:
    """The answers that are problems, by their status."""
    by_status: dict[int, list[str]] = {CODES["internal"]: ["internal"]}
    for code in codes:
        by_status.setdefault(CODES[code], []).append(code)
    described: dict[str, Any] = {}
    for status, names in sorted(by_status.items()):
        answer: dict[str, Any] = {
            "description": " or ".join(f"`{name}`" for name in sorted(names)),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}},
        }
        if not RETRY_LATER.isdisjoint(names):
            answer["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
        described[str(status)] = answer
    return described


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type in _ENCODINGS}


def _parameters(call: Call) -> Iterator[dict[str, Any]]:
    for name in call.parameters:
        schema = {"type": "string", "pattern": IDENTIFIER}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    if call.query is not None:
        for name, schema in call.query.model_json_schema()["properties"].items():
            if name not in call.parameters and not (call.op == "envs" and name == "env_id"):
                yield {"name": name, "in": "query", "required": False, "schema": schema}


def _other_paths() -> dict[str, Any]:
    ready = {
        "200": _page("Ready", "application/json"),
        "503": _page("Starting or draining", "application/json"),
    }
    return {
        "/health": _open("Whether the server lives", {"200": _page("Alive", "application/json")}),
        "/ready": _open("Whether the server takes new sessions", ready),
        "/metrics": {
            "get": {
                "summary": "Prometheus metrics (role admin)",
                "responses": {"200": _page("Metrics", "text/plain"), **_refused()},
            }
        },
        "/openapi.json": _open("This document", {"200": _page("OpenAPI", "application/json")}),
        "/docs": _open("This document for people", {"200": _page("A page", "text/html")}),
        "/v1/ws": {
            "get": _upgrade("WebSocket: all operations, many sessions (rollgym.v1.json, rollgym.v1.msgpack)")
        },
    }


def _upgrade(summary: str) -> dict[str, Any]:
    """A socket."""
    return {
        "summary": summary,
        "responses": {"101": {"description": "Switching protocols"}, **_refused()},
    }


def _refused() -> dict[str, Any]:
    return _problems(("unauthorized", "forbidden"), {"$ref": _REFERENCE.format(model="Problem")})


def _open(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    """A page that needs no token."""
    return {"get": {"summary": summary, "security": [], "responses": responses}}


def _page(description: str, media_type: str) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {}}}
