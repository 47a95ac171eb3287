"""Calls over HTTP: in which order they are looked at, whether FastAPI runs them or a plain route."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Match, Mount

import rollgym
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.tokens import Quota, add_token
from rollgym.env_server.http.call_routes import CallRoute, PlainRoute
from rollgym.env_server.http.calls import CALLS, HOT_CALLS, REGISTRATION_CALLS, RUN_CODE_CALLS
from rollgym.env_server.protocols.gem import GEM_CALLS
from rollgym.env_server.protocols.openenv import OPENENV_CALLS, OPENENV_HEALTH
from tests.support.wire import INLINE, Server

ROUTERS = (HOT_CALLS, GEM_CALLS, CALLS, OPENENV_CALLS, OPENENV_HEALTH, REGISTRATION_CALLS)
PLAIN, BY_FASTAPI = "/v1/sessions/none/step", "/v1/sessions/none/fork"
BAD_JSON = {"content": b"{", "headers": {"Content-Type": "application/json"}}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file = tmp_path_factory.mktemp("calls") / "tokens.yaml"
    made = {name: add_token(file, name, [role]) for name, role in (("player", "play"), ("node", "register"))}
    made["slow"] = add_token(file, "slow", ["play"], Quota(rate_limit=1))
    made["root"] = add_token(file, "root", ["admin"])
    return file, made


@pytest.fixture
async def client(tokens: tuple[Path, dict[str, str]]) -> AsyncIterator[httpx.AsyncClient]:
    environments = rollgym.create_app(
        env=["Count=tests.support.served_envs:Count"],
        isolation={"Count": "inline"},
        builtin=False,
        workers=1,
        gateway=True,
        max_request_bytes=4096,
        token_file=tokens[0],
    )
    mounted = Starlette(routes=[Mount("/labs/{env_id}", environments)], lifespan=environments.lifespan)
    transport = httpx.ASGITransport(mounted)
    async with (
        environments.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost/labs/mine") as client,
    ):
        yield client


def every_call() -> list[tuple[str, str]]:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, CallRoute)]
    return [(min(route.methods or ()), route.path) for route in routes]


def code(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["code"])


async def test_who_asks_comes_before_what_is_asked(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    calls = [each for each in every_call() if not each[1].endswith("/health")]
    assert len(calls) > 20
    for method, path in calls:
        for body in (b"{", b"[" * 5000, b"{}"):
            answer = await client.request(method, path, content=body)
            assert (answer.status_code, code(answer)) == (401, "unauthorized"), (method, path)
            assert "Bearer" in answer.headers["www-authenticate"]
        role = "player" if "registration" in path or (method, path) == ("POST", "/v1/envs") else "node"
        headers = {"Authorization": f"Bearer {tokens[1][role]}"}
        answer = await client.request(method, path, content=b"{", headers=headers)
        assert (answer.status_code, code(answer)) == (403, "forbidden"), (method, path)


async def test_limits_and_encodings_come_before_parsing(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    client.headers["Authorization"] = f"Bearer {tokens[1]['root']}"
    for method, path in every_call():
        answer = await client.request(method, path, content=b"[" * 5000)
        # A restore may have as many bytes as an episode.
        refused = (422, "invalid_request") if path.endswith("/restore") else (413, "too_large")
        assert (answer.status_code, code(answer)) == refused, (method, path)
        answer = await client.request(method, path, content=b"a=1", headers={"Content-Type": "text/plain"})
        assert (answer.status_code, code(answer)) == (415, "unsupported_media_type"), (method, path)
        answer = await client.request(method, path, **BAD_JSON)
        assert (answer.status_code, code(answer)) == (422, "invalid_request"), (method, path)
        for name in ("id", "op", "session_id", "traceparent"):
            answer = await client.request(method, path, json={name: "x"})
            assert (code(answer), answer.json()["errors"][0]["field"]) == ("invalid_request", name)
        answer = await client.request(method, f"{path}?nonsense=1", json=None)
        assert (code(answer), answer.json()["errors"][0]["field"]) == ("invalid_request", "nonsense")


async def test_every_call_takes_messagepack(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    client.headers["Authorization"] = f"Bearer {tokens[1]['root']}"
    headers = {"Content-Type": "application/msgpack"}

    async def ask(path: str, **fields: Any) -> dict[str, Any]:
        answer = await client.post(path, content=dumps(fields, binary=True), headers=headers)
        assert answer.headers["content-type"] == "application/msgpack", answer.text
        reply: dict[str, Any] = loads(answer.content, binary=True)
        return reply

    made = await ask("/v1/sessions", env_id="Count", reset={"seed": 1})
    session = f"/v1/sessions/{made['session_id']}"
    assert (await ask(f"{session}/step", action="a"))["step"] == 1
    (copy,) = (await ask(f"{session}/fork"))["session_ids"]
    assert (await ask("/v1/sessions/close", session_ids=[copy])) == {"closed": 1}
    assert (await ask("/openenv/Count/reset", seed=1))["done"] is False


@pytest.mark.parametrize("path", [PLAIN, BY_FASTAPI])
async def test_a_misfit_is_answered_as_its_operation_answers_it(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]], path: str
) -> None:
    """Its session comes first, it costs the caller's rate, and it is counted."""
    operation = path.rpartition("/")[2]
    slow = {"Authorization": f"Bearer {tokens[1]['slow']}"}
    root = {"Authorization": f"Bearer {tokens[1]['root']}"}
    answer = await client.post(path, json={"nonsense": 1}, headers=root)
    assert (answer.status_code, code(answer)) == (404, "unknown_session")
    made = (await client.post("/v1/sessions", json={"env_id": "Count"}, headers=root)).json()["session_id"]
    answer = await client.post(path.replace("none", made), json={"nonsense": 1}, headers=root)
    assert code(answer) == "invalid_request"
    assert "nonsense" in [each["field"] for each in answer.json()["errors"]]
    counted = (await client.get("/metrics", headers=root)).text
    assert f'rollgym_operations_total{{code="invalid_request",op="{operation}"}} 1.0' in counted
    codes = [code(await client.post(path, json={"nonsense": 1}, headers=slow)) for _ in range(3)]
    assert codes[-1] == "rate_limited", codes


def test_hot_calls_are_plain_and_the_others_are_fastapis() -> None:
    hot = {route.name for router in (HOT_CALLS, GEM_CALLS) for route in router.routes}
    assert hot == {
        "step",
        "reset",
        "verify",
        "restore",
        *(f"gem_{op}" for op in ("step", "reset", "make", "close", "list")),
    }
    for router in (CALLS, OPENENV_CALLS, REGISTRATION_CALLS, RUN_CODE_CALLS):
        assert not any(isinstance(route, PlainRoute) for route in router.routes)


def test_a_plain_route_leaves_other_methods_to_others() -> None:
    (step,) = (route for route in HOT_CALLS.routes if isinstance(route, PlainRoute) and route.name == "step")
    scope = {"type": "http", "path": "/v1/sessions/a/step", "root_path": "", "headers": []}
    assert step.matches({**scope, "method": "POST"})[0] is Match.FULL
    assert step.matches({**scope, "method": "GET"})[0] is Match.NONE


async def test_fastapi_runs_a_hot_call_to_the_same_answer(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a plain route leaves out is nothing that an answer depends on."""
    client.headers["Authorization"] = f"Bearer {tokens[1]['root']}"
    (step,) = (route for route in HOT_CALLS.routes if isinstance(route, PlainRoute) and route.name == "step")
    fastapi = FastAPI(
        routes=[
            CallRoute(step.path, step.endpoint, methods=["POST"], name="step", dependencies=step.dependencies)
        ]
    )
    made = (await client.post("/v1/sessions", json={"env_id": "Count", "reset": {"seed": 1}})).json()
    path = f"/v1/sessions/{made['session_id']}/step"
    fields = (
        {"action": "a", "step": 0},
        {"action": 1},
        {},
        {"action": "a", "step": -1},
        {"action": "b", "step": 7},
    )
    plain = [(await client.post(path, json=each)).json() for each in fields]
    monkeypatch.setattr(step, "handle", fastapi)
    assert [(await client.post(path, json=each)).json() for each in fields] == plain
    assert len({each.get("code") for each in plain}) >= 3


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/sessions", "GET, HEAD, OPTIONS, POST"),
        ("GET", PLAIN, "OPTIONS, POST"),
        ("HEAD", PLAIN, "OPTIONS, POST"),
        ("POST", "/v1/sessions/none", "DELETE, GET, HEAD, OPTIONS"),
        ("PATCH", "/openenv/Count/mcp", "POST, DELETE"),
        ("DELETE", "/openenv/Count/openapi.json", "GET, HEAD, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("QUERY", "/v1/info", "GET, HEAD, OPTIONS"),
    ],
)
async def test_a_method_that_a_path_does_not_have_is_not_allowed(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    """Whoever asks: the answer says no more than the OpenAPI document, which needs no token."""
    for headers in ({}, {"Authorization": "Bearer unknown"}):
        answer = await client.request(method, path, headers=headers)
        if "mcp" in path and answer.status_code == 401:
            continue
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        if method != "HEAD":
            assert answer.json()["code"] == "method_not_allowed"


async def test_options_are_answered_with_the_methods_and_head_as_get_without_a_body(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    headers = {"Authorization": f"Bearer {tokens[1]['player']}"}
    for path in ("/v1/info", "/health", "/openapi.json", "/openenv/Count/health", "/v1/envs/Count"):
        got, head = [await client.request(each, path, headers=headers) for each in ("GET", "HEAD")]
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        assert int(head.headers["content-length"]) > 0
        options = await client.options(path)
        assert (options.status_code, options.content) == (204, b"")
        assert options.headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await client.head("/v1/info")).status_code == 401, "it needs the token that a GET needs"
    assert (await client.options("/v1/nothing")).status_code == 404
    assert (await client.head("/v1/nothing")).status_code == 404


async def test_a_whole_number_may_be_written_with_a_point(
    client: httpx.AsyncClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    headers = {"Authorization": f"Bearer {tokens[1]['player']}"}
    body = {"env_id": "Count", "count": 2.0, "reset": {"seed": 7.0}}
    answer = await client.post("/v1/sessions", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    made = answer.json()["sessions"]
    assert [each["reset"]["seed"] for each in made] == [7, 7]
    path = f"/v1/sessions/{made[0]['session_id']}"
    step = {"action": "a", "episode": 0.0, "step": 0.0}
    stepped = await client.post(f"{path}/step", json=step, headers=headers)
    assert (stepped.status_code, stepped.json()["step"]) == (200, 1)
    forked = await client.post(f"{path}/fork", json={"count": 1.0, "reseed": 3.0}, headers=headers)
    assert forked.status_code == 201
    for count in (2.5, True, "2", 1e300, -1.0):
        refused = await client.post("/v1/sessions", json={**body, "count": count}, headers=headers)
        assert refused.json()["code"] == "invalid_request", count
    ids = [*(each["session_id"] for each in made), *forked.json()["session_ids"]]
    await client.post("/v1/sessions/close", json={"session_ids": ids}, headers=headers)


async def test_a_request_makes_as_many_sessions_as_the_document_says() -> None:
    with Server("--env", "Count=tests.support.served_envs:Count", *INLINE[:2], "--no-builtin") as server:
        async with server.http() as client:
            make = {"env_id": "Count", "count": 1024.0}
            sessions = (await client.post("/v1/sessions", json=make)).json()["sessions"]
            assert len({each["session_id"] for each in sessions}) == 1024
            for count in (1025, 0, 1.5):
                refused = await client.post("/v1/sessions", json={"env_id": "Count", "count": count})
                assert refused.json()["code"] == "invalid_request", count
