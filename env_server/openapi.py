"""The description of the HTTP calls for tools and people."""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from clients.protocol.errors import CODES
from clients.protocol.frames import MEDIA_TYPES
from env_server.calls import Call
from env_server.negotiation import PROBLEM_MEDIA_TYPE

_REFERENCE = "#/components/schemas/{model}"
_ENCODINGS = (MEDIA_TYPES[False], MEDIA_TYPES[True])

DOCS_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><title>rollgym</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="docs">The description is at <a href="/openapi.json">/openapi.json</a>.</div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#docs"});</script>
</body>
</html>
"""


class Problem(BaseModel):
    """A failure (RFC 9457); `code` is what programs look at."""

    type: str
    title: str
    status: int
    code: str
    detail: str


def describe_calls(calls: Sequence[Call]) -> dict[str, Any]:
    """The OpenAPI document of calls."""
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
        "security": [{"token": []}, {}],
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
            "default": {
                "description": "A problem",
                "content": {PROBLEM_MEDIA_TYPE: {"schema": schemas[Problem]}},
            },
        },
    }
    if call.request is not None:
        required = any(field.is_required() for field in call.request.model_fields.values())
        described["requestBody"] = {"required": required, "content": _content(schemas[call.request])}
    return described


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type in _ENCODINGS}


def _parameters(call: Call) -> Iterator[dict[str, Any]]:
    for name in call.parameters:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if call.query is not None:
        for name, schema in call.query.model_json_schema()["properties"].items():
            if name not in call.parameters and not (call.op == "envs" and name == "env_id"):
                yield {"name": name, "in": "query", "required": False, "schema": schema}


def _other_paths() -> dict[str, Any]:
    text = {"200": {"description": "Text"}}
    return {
        "/health": {
            "get": {"summary": "Whether the server lives", "responses": {"200": {"description": "Alive"}}}
        },
        "/ready": {
            "get": {
                "summary": "Whether the server takes new sessions",
                "responses": {
                    "200": {"description": "Ready"},
                    "503": {"description": "Starting or draining"},
                },
            }
        },
        "/metrics": {"get": {"summary": "Prometheus metrics (role admin)", "responses": text}},
        "/openapi.json": {
            "get": {"summary": "This document", "responses": {"200": {"description": "OpenAPI"}}}
        },
        "/docs": {"get": {"summary": "This document for people", "responses": text}},
        "/v1/ws": {
            "get": {
                "summary": "WebSocket: all operations, many sessions (rollgym.v1.json, rollgym.v1.msgpack)",
                "responses": {"101": {"description": "Switching protocols"}},
            }
        },
    }
