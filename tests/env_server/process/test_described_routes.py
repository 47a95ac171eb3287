"""Everything that the application answers is in the OpenAPI document, whatever the server was started with."""

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest

from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings_loading import check_settings
from rollgym.env_server.operations.services import Services
from rollgym.env_server.process.app import App
from tests.support.wire import Server

SETTINGS: list[dict[str, Any]] = [{}, {"sandbox": "auto"}, {"gateway": True, "allow_network": ["loopback"]}]


def app(**given: Any) -> App:
    settings = check_settings({"builtin": False, **given})
    return App(Services(settings, ProcessRank(directory=None), Tokens.load(None), Catalog.load(settings)))


async def described(served: App) -> dict[str, Any]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served), base_url="http://localhost"
    ) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
        return document


async def test_others_are_answered_while_the_document_is_written() -> None:
    # Nobody has to have a token for it, and it is written only when somebody asks.
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://localhost") as client:
        document = asyncio.create_task(client.get("/openapi.json"))
        answered = 0
        while not document.done():
            assert (await client.get("/health")).is_success
            answered += 1
            await asyncio.sleep(0)
        assert (await document).is_success
    assert answered > 5, "in the loop, it is complete after one or two turns"


def is_of_the_console(path: str) -> bool:
    """Whether a path is that of a file which pages are made of, and of no protocol."""
    return path == "/" or path.startswith("/console")


@pytest.mark.parametrize("settings", SETTINGS)
async def test_every_route_is_described_and_nothing_else(settings: dict[str, Any]) -> None:
    served = app(**settings)
    paths = {path for path in served.paths if not is_of_the_console(path)}
    named = set((await described(served))["paths"])
    # Calls of the Open Reward Standard may leave the environment out, which a header names then.
    short = {path.removeprefix("/{env_id}") for path in named if path.startswith("/{env_id}/")}
    assert paths == named | short | {"//ping"}


@pytest.mark.parametrize("settings", SETTINGS)
async def test_every_operation_has_an_id_of_its_own_a_description_and_a_tag(settings: dict[str, Any]) -> None:
    document = await described(app(**settings))
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    ids = [each["operationId"] for each in operations]
    assert len(ids) == len(set(ids))
    known = {tag["name"] for tag in document["tags"]}
    for each in operations:
        assert each["description"]
        assert known.issuperset(each["tags"])
    assert document["servers"] == [{"url": "/"}]


@pytest.mark.parametrize(
    ("settings", "sockets"),
    [
        (SETTINGS[0], {"/v1/ws", "/openenv/{env_id}/ws", "/openenv/{env_id}/mcp"}),
        (SETTINGS[1], {"/v1/ws", "/openenv/{env_id}/ws", "/openenv/{env_id}/mcp", "/v1/sandbox/session"}),
    ],
)
async def test_sockets_are_told_from_calls(settings: dict[str, Any], sockets: set[str]) -> None:
    paths = (await described(app(**settings)))["paths"]
    found = {
        path for path, methods in paths.items() if methods.get("get", {}).get("responses", {}).get("101")
    }
    assert found == sockets
    named = paths["/openenv/{env_id}/ws"]["get"]["parameters"]
    assert [each["name"] for each in named] == ["env_id"]


def message(method: str, **fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, **fields}


async def test_what_mcp_answers_is_what_is_described(server: Server) -> None:
    async with server.http() as client:
        calls = (await client.get("/openapi.json")).json()["paths"]["/mcp/{env_id}"]
        schema = calls["post"]["requestBody"]["content"]["application/json"]["schema"]

        async def said(body: Any, path: str = "Count", **headers: str) -> httpx.Response:
            answer = await client.post(f"/mcp/{path}", json=body, headers=headers)
            told = calls["post"]["responses"][str(answer.status_code)]
            if answer.content:
                media_type = answer.headers["content-type"].partition(";")[0]
                wanted = told.get("content", {})[media_type]["schema"]
                if "$ref" not in wanted:
                    jsonschema.validate(answer.json(), wanted)
            return answer

        begun = message("initialize", params={"protocolVersion": "2025-11-25"})
        jsonschema.validate(begun, schema)
        made = await said(begun)
        session = made.headers["mcp-session-id"]
        assert (await said(message("tools/list"), **{"Mcp-Session-Id": session})).status_code == 200
        called = message("tools/call", params={"name": "step", "arguments": {"action": "a"}})
        assert (await said(called, **{"Mcp-Session-Id": session})).status_code == 200
        statuses = [
            (await said(message("nothing"))).status_code,
            (await said({"jsonrpc": "2.0", "method": "notifications/initialized"})).status_code,
            (await said(message("tools/list"))).status_code,
            (await said([])).status_code,
            (await said(begun, "Nothing-v0")).status_code,
            (await said(begun, "Count?seed=x")).status_code,
            (await said(begun, **{"MCP-Protocol-Version": "1"})).status_code,
        ]
        assert statuses == [200, 202, 400, 400, 404, 422, 400]
        ended = await client.delete("/mcp/Count", headers={"Mcp-Session-Id": session})
        assert ended.status_code == 204
        assert str(ended.status_code) in calls["delete"]["responses"]


# Of OpenEnv, and not looked at.
UNREAD = {("OpenEnvAction", "metadata")}


def named_in(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"].rpartition("/")[2]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(named_in, part.values()))
    return set().union(*map(named_in, part)) if isinstance(part, list) else set()


def of_requests(document: dict[str, Any]) -> dict[str, Any]:
    """The schemas of bodies, and those that they are made of."""
    schemas, found = document["components"]["schemas"], set()
    new = named_in(
        [each.get("requestBody") for calls in document["paths"].values() for each in calls.values()]
    )
    while new:
        found |= new
        new = set().union(*(named_in(schemas[name]) for name in new)) - found
    return {name: schemas[name] for name in found}


def says_nothing(schema: Any) -> bool:
    """Whether a schema, or one that it is made of, lets anything pass."""
    if not isinstance(schema, dict):
        return bool(schema)
    parts = [schema, *schema.get("anyOf", ())]
    return any(
        part.keys().isdisjoint(("$ref", "allOf", "anyOf", "type", "enum", "const"))
        or ("items" in part and says_nothing(part["items"]))
        or (part.get("type") == "object" and says_nothing(part.get("additionalProperties", True)))
        for part in parts
    )


@pytest.mark.parametrize("settings", SETTINGS)
async def test_a_request_says_of_each_field_what_it_may_hold(settings: dict[str, Any]) -> None:
    asked = of_requests(await described(app(**settings)))
    vague = {
        (name, field)
        for name, schema in asked.items()
        for field, each in schema.get("properties", {}).items()
        if says_nothing(each)
    }
    assert vague == UNREAD
    assert named_in(asked["StepRequest"]["properties"]["action"]) == {"FreeForm"}
