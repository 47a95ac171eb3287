"""Additions to FastAPI's description of the calls: problems, MessagePack, pages and sockets."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from starlette.routing import BaseRoute

from rollgym.clients.protocol.errors import CODES, RETRY_LATER, codes_of
from rollgym.clients.protocol.frames import MEDIA_TYPES
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.env_server.common.negotiation import PROBLEM_MEDIA_TYPE
from rollgym.version import __version__

ON_SESSION = codes_of(lambda problem: "session" in problem.answers)
"""The problems of calls on a session."""

RUNS = ON_SESSION | codes_of(lambda problem: "run" in problem.answers)
"""The problems of calls that run the environment of a session."""

MAKES = codes_of(lambda problem: "make" in problem.answers)
"""The problems of calls that make an environment."""

SCORES = codes_of(lambda problem: "score" in problem.answers)
"""The problems of calls that score responses."""

_SCHEMAS = "#/components/schemas/"


class Tag(NamedTuple):
    """A tag of operations: those whose path begins with a prefix, unless a tag before it has them.

    Attributes:
        prefix: The begin of the paths.
        name: Its name.
        text: What its operations are about; empty where another tag of the name says so.
        page: The page that explains them.
    """

    prefix: str
    name: str
    text: str
    page: str


class EnvironmentDocument(NamedTuple):
    """A document for each environment, of some calls alone, as a server of this environment alone would have it.

    Attributes:
        base: The path that its calls are below, with the environment's id as its one parameter.
        tag: The tag of these calls.
        version: The version of the calls.
    """

    base: str
    tag: str
    version: str

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.base}/openapi.json"


_TAGS = (
    Tag("/v1/sandbox", "sandbox", "Programs in the server's sandbox.", "docs/run_code.md"),
    Tag("/run_code", "sandbox", "", "docs/run_code.md"),
    Tag("/v1/envs", "environments", "What is served.", "docs/protocol.md"),
    Tag("/v1/verify", "environments", "", "docs/protocol.md"),
    Tag(
        "/v1/registrations",
        "registrations",
        "Environments of other servers, at a gateway.",
        "docs/gateway.md",
    ),
    Tag("/v1", "sessions", "Environments of one caller, and their episodes.", "docs/protocol.md"),
)
_SERVER_TAG = Tag("/", "server", "The server itself.", "docs/observability.md")
_ALWAYS = codes_of(lambda problem: "any" in problem.answers)


class Problem(BaseModel):
    """A failure (RFC 9457); `code` is what programs look at, and further members depend on it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str


def problems(*codes: str, always: Collection[str] = _ALWAYS) -> dict[int | str, dict[str, Any]]:
    """The answers of a call that are problems, by their status, for its route's `responses`.

    Args:
        *codes: The problems of this call.
        always: The problems of every call.
    """
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys((*always, *codes)):
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
    documents: Iterable[EnvironmentDocument],
    tags: Iterable[Tag],
    *,
    needs_token: bool,
) -> dict[str, Any]:
    """The OpenAPI document of a server.

    Args:
        routes: Its calls.
        sockets: The purposes of its WebSockets, by their paths.
        others: Calls of other protocols, described by their methods, by their paths.
        documents: The documents that each environment has.
        tags: The tags of calls of other protocols.
        needs_token: Whether it has tokens.
    """
    document = get_openapi(
        title="rollgym environment server",
        version=__version__,
        description="Environments over HTTP. The same operations go over one WebSocket at /v1/ws.",
        routes=routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
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
    described_sockets = {
        path: {"get": _socket(path, what) | {"responses": answers}} for path, what in sockets.items()
    }
    document["paths"] |= {
        "/health": _page("Whether the server lives", "application/json"),
        "/ready": _page("Whether the server takes new sessions", "application/json"),
        "/metrics": _page("Prometheus metrics (role admin)", "text/plain"),
        "/openapi.json": _page("This document", "application/json"),
        **{each.path: _environment_page(each) for each in documents},
        "/docs": _page("This document for people", "text/html"),
        **described_sockets,
    }
    for path, calls in others.items():
        document["paths"][path] = {**document["paths"].get(path, {}), **calls}
    document["paths"]["/ready"]["get"]["responses"]["503"] = {"description": "Starting or draining"}
    document["paths"]["/metrics"]["get"]["responses"] |= refused
    del document["paths"]["/metrics"]["get"]["security"]
    document["security"] = [{"token": []}] if needs_token else []
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["servers"] = [{"url": "/"}]
    every = (*_TAGS, *tags, _SERVER_TAG)
    document["tags"] = [{"name": tag.name, "description": tag.text} for tag in every if tag.text]
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            _complete(described, method, path, every)
    return document


def environment_document(document: Mapping[str, Any], wanted: EnvironmentDocument) -> dict[str, Any]:
    """The OpenAPI document of one environment's calls, without the environment's name.

    Args:
        document: That of the server.
        wanted: Which calls.
    """
    paths: dict[str, Any] = {}
    for path, methods in document["paths"].items():
        if path.startswith(f"{wanted.base}/"):
            paths[path.removeprefix(wanted.base)] = {
                method: _without_env_id(described) for method, described in methods.items()
            }
    every = document["components"]["schemas"]
    schemas: dict[str, Any] = {}
    found = _references(paths)
    while found:
        name = found.pop()
        schemas[name] = every[name]
        found |= _references(every[name]) - schemas.keys()
    components = {**document["components"], "schemas": schemas}
    tags = [tag for tag in document["tags"] if tag["name"] == wanted.tag]
    info = {**document["info"], "version": wanted.version}
    return {**document, "info": info, "paths": paths, "components": components, "tags": tags}


def about_environment(document: Mapping[str, Any], described: Mapping[str, Any], base: str) -> dict[str, Any]:
    """An `environment_document`, with the name of the environment that it is about.

    Args:
        document: That document.
        described: The environment's `EnvInfo`.
        base: The URL that its paths are below.
    """
    info = {"title": described["env_id"], "description": described["description"]}
    return {**document, "info": {**document["info"], **info}, "servers": [{"url": base}]}


def _without_env_id(described: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [each for each in described.get("parameters", ()) if each["name"] != "env_id"]
    rest = {name: value for name, value in described.items() if name != "parameters"}
    return rest | ({"parameters": parameters} if parameters else {})


def _references(value: Any) -> set[str]:
    """The schemas that a part of a document names."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        named = {reference.removeprefix(_SCHEMAS)} if isinstance(reference, str) else set()
        return named.union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _complete(described: dict[str, Any], method: str, path: str, tags: Iterable[Tag]) -> None:
    """Add the parts of an operation that readers of the document require: a tag, an id, a description."""
    tag = next(each for each in tags if path.startswith(each.prefix))
    described["tags"] = [tag.name]
    words = re.findall(r"\w+", path.removeprefix("/v1"))
    described.setdefault("operationId", "_".join([method, *words]))
    if not described.get("description"):
        described["description"] = f"{described['summary'].removesuffix('.')}. See {tag.page}."


def _socket(path: str, what: str) -> dict[str, Any]:
    """A WebSocket, which OpenAPI knows as a GET that goes over to another protocol."""
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [_parameter(name) for name in names]
    return {"summary": f"WebSocket: {what}", **({"parameters": parameters} if parameters else {})}


def _parameter(name: str) -> dict[str, Any]:
    """An id in a path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": IDENTIFIER}}


def _environment_page(document: EnvironmentDocument) -> dict[str, Any]:
    """The page about the calls of one environment."""
    page = _page(f"{document.tag}: the description of these calls, for one environment", "application/json")
    page["get"]["parameters"] = [_parameter("env_id")]
    page["get"]["responses"] |= {
        str(status): each for status, each in problems("unknown_env", "draining", always=()).items()
    }
    return page


def _page(summary: str, media_type: str) -> dict[str, Any]:
    """A page that needs no token."""
    answers = {"200": {"description": "Done", "content": {media_type: {}}}}
    return {"get": {"summary": summary, "security": [], "responses": answers}}
