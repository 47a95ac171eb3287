"""What the server says about itself: OpenAPI, info, metrics."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.wire import ENVS, INLINE, Server

PATHS = {
    *(
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/v1/ws",
        "/v1/info",
        "/v1/envs",
        "/v1/envs/{env_id}",
    ),
    *("/v1/sessions", "/v1/sessions/restore", "/v1/sessions/close", "/v1/sessions/{session_id}"),
    *(f"/v1/sessions/{{session_id}}/{op}" for op in ("reset", "step", "render", "cancel", "fork", "episode")),
    "/v1/verify/{env_id}",
    *(
        f"/openenv/{{env_id}}/{name}"
        for name in ("reset", "step", "state", "schema", "metadata", "health", "ws", "openapi.json", "mcp")
    ),
    "/openenv/{env_id}/list_environments",
    *(
        f"/openenv/{{env_id}}/{{env_name}}/{name}"
        for name in ("splits", "tasks", "num_tasks", "task", "task_range")
    ),
    "/mcp/{env_id}",
    *(f"/apis/v1/envs/gem/{name}" for name in ("make", "reset", "step", "close", "list")),
    *("/version", "/list_environments", "/create_session", "/create", "/ping", "/delete", "/delete_session"),
    *(f"/{{env_id}}/{name}" for name in ("splits", "tools", "task_tools", "prompt", "messages")),
    *(f"/{{env_id}}/{name}" for name in ("num_tasks", "tasks", "task", "task_range", "call", "score_group")),
}
METHODS = {
    "/mcp/{env_id}": {"post", "delete"},
    "/v1/sessions": {"get", "post"},
    "/v1/sessions/{session_id}": {"get", "delete"},
    "/v1/verify/{env_id}": {"post"},
    **{f"/v1/sessions/{op}": {"post"} for op in ("restore", "close")},
    **{f"/v1/sessions/{{session_id}}/{op}": {"post"} for op in ("reset", "step", "render", "cancel", "fork")},
    **{f"/openenv/{{env_id}}/{name}": {"post"} for name in ("reset", "step")},
    "/openenv/{env_id}/mcp": {"post", "delete", "get"},
    **{
        f"/openenv/{{env_id}}/{{env_name}}/{name}": {"post"}
        for name in ("tasks", "num_tasks", "task", "task_range")
    },
    **{f"/apis/v1/envs/gem/{name}": {"post"} for name in ("make", "reset", "step", "close", "list")},
    **{f"/{name}": {"post"} for name in ("create_session", "create", "ping", "delete", "delete_session")},
    **{
        f"/{{env_id}}/{name}": {"post"}
        for name in ("num_tasks", "tasks", "task", "task_range", "call", "score_group")
    },
}
"""Of the paths that are not for GET alone."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of its own: here sessions are counted, and those that other tests have dropped end when they like."""
    with Server(
        *ENVS, *INLINE, *("--gymnasium", "CartPole-v1", "--isolation", "CartPole-v1=inline")
    ) as running:
        yield running


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(each) for each in value.values()))
    if isinstance(value, list):
        return set().union(*(references(each) for each in value))
    return set()


async def test_openapi_lists_all_calls(server: Server) -> None:
    async with server.http() as client:
        document = (await client.get("/openapi.json")).json()
        assert set(document["paths"]) == PATHS
        assert {
            path: set(methods) for path, methods in document["paths"].items() if methods.keys() != {"get"}
        } == METHODS
        known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert references(document) <= known
        names = [
            each["operationId"]
            for methods in document["paths"].values()
            for each in methods.values()
            if "operationId" in each
        ]
        assert len(names) == len(set(names))
        docs = await client.get("/docs")
        assert "/openapi.json" in docs.text


async def test_every_described_call_is_there(server: Server) -> None:
    async with server.http() as client:
        document = (await client.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method in methods:
                if not path.endswith("/ws"):
                    answer = await client.request(method, re.sub(r"\{\w+\}", "none", path))
                    code = (
                        answer.json().get("code")
                        if "problem" in answer.headers.get("content-type", "")
                        else None
                    )
                    assert code != "not_found", (method, path)


async def test_info(server: Server) -> None:
    async with server.http() as client, server.socket() as socket:
        info = (await client.get("/v1/info")).json()
        assert (info["protocol"], info["role"], info["processes"], info["process"]) == (1, "server", 1, 0)
        assert info["limits"]["max_batch"] == 1024
        assert info["limits"]["max_request_bytes"] == 2**20
        assert info["capacity"]["max_sessions"] == 4096
        before = info["capacity"]["sessions"]
        made = await socket.make()
        assert 1 <= (await socket.call("info"))["capacity"]["sessions"] <= before + 1
        await socket.call("close", session_id=made)
        assert (await socket.call("envs", env_id="Count"))["version"] == "7"
        assert (await socket.call("envs"))["envs"] == (await client.get("/v1/envs")).json()["envs"]


async def test_metrics(server: Server) -> None:
    async with server.http() as client, server.socket() as socket:
        before = await samples(client)
        made = await socket.make(kwargs={"length": 5})
        await socket.call("step", session_id=made, action="a")
        await socket.ask("step", session_id=made, action="raise")
        await client.post("/v1/verify/Equal", json={"items": [{"response": "4", "answer": "4"}]})
        after = await samples(client)

        def grown(name: str, **labels: str) -> float:
            key = (name, tuple(sorted(labels.items())))
            return after.get(key, 0.0) - before.get(key, 0.0)

        assert grown("rollgym_steps_total", env_id="Count") == 1
        assert grown("rollgym_resets_total", env_id="Count") == 1
        assert grown("rollgym_sessions", env_id="Count") == 1
        assert grown("rollgym_operations_total", op="step", code="ok") == 1
        assert grown("rollgym_operations_total", op="step", code="env_error") == 1
        assert grown("rollgym_problems_total", code="env_error") == 1
        assert grown("rollgym_verdicts_total", env_id="Equal", outcome="correct") == 1
        assert after[("rollgym_sockets", ())] >= 1
        assert after[("process_cpu_seconds_total", ())] > 0
        await socket.call("close", session_id=made)
        assert dict(await samples(client))[("rollgym_sessions_ended_total", (("reason", "closed"),))] >= 1


async def samples(client: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_labels_of_metrics_are_bounded(server: Server) -> None:
    async with server.http() as client, server.socket() as socket:
        before = len(await samples(client))
        for number in range(20):
            await socket.ask(f"op{number}")
            await client.get(f"/v1/envs/env{number}")
            await socket.ask("make", env_id=f"env{number}")
        assert len(await samples(client)) <= before + 4


async def test_a_score_that_is_no_finite_number_is_an_error(server: Server) -> None:
    async with server.socket() as socket:
        items = [{"response": said, "answer": "4"} for said in ("nan", "4", "inf")]
        results = (await socket.call("verify", env_id="Equal", items=items))["results"]
    assert [(each["score"], each["outcome"]) for each in results] == [
        (0.0, "error"),
        (1.0, "correct"),
        (0.0, "error"),
    ]


async def test_verify(server: Server) -> None:
    async with server.http() as client, server.socket(binary=True) as socket:
        items = [{"response": each, "answer": "4"} for each in ("4", "5", "raise", "4")]
        results = (await client.post("/v1/verify/Equal", json={"items": items})).json()["results"]
        assert [each["outcome"] for each in results] == ["correct", "wrong", "error", "correct"]
        assert [each["score"] for each in results] == [1.0, 0.0, 0.0, 1.0]
        assert await socket.call("verify", env_id="Equal", items=items) == {"results": results}
        assert await socket.call("verify", env_id="Equal", items=[]) == {"results": []}
        slow = [{"response": "sleep 30", "answer": "4"}, {"response": "4", "answer": "4"}]
        results = (await socket.call("verify", env_id="Equal", items=slow, timeout_s=0.5))["results"]
        assert [each["outcome"] for each in results] == ["timeout", "correct"]
