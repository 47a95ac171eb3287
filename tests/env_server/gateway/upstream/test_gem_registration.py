"""Registered GEM servers: our own adapter as one, and such as do not do what they should."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ENVS, ServerProcess
from tests.support.foreign_gem import STEP, Gem
from tests.support.foreign_servers import Said, plain, scripted


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    arguments = ("--gateway", "--allow-network", "loopback", "--log-level", "error", "--step-timeout-s", "2")
    with ServerProcess(arguments) as running:
        yield running


@pytest.fixture
async def http(gateway: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


async def register(http: httpx.AsyncClient, url: str, **fields: Any) -> dict[str, Any]:
    body = {"env_id": "Box", "url": url, "protocol": "gem", **fields}
    reply: dict[str, Any] = (await http.post("/v1/envs", json=body)).json()
    return reply


async def unregister(http: httpx.AsyncClient, registered: dict[str, Any]) -> None:
    answer = await http.delete(f"/v1/registrations/{registered['registration_id']}")
    assert answer.status_code == 204


async def test_our_own_face_is_such_a_server(gateway: ServerProcess, http: httpx.AsyncClient) -> None:
    with ServerProcess((*ENVS, "--log-level", "error")) as node:
        registered = await register(http, node.url, upstream_env_id="FrozenLake-v0")
        async with EnvClient(node.url) as there, EnvClient(gateway.url) as here:
            ours, theirs = await there.make("FrozenLake-v0"), await here.make("Box")
            assert (await ours.reset(seed=2))[:2] == (await theirs.reset(seed=2))[:2]
            for action in ("Right", "nonsense", "Down"):
                assert await ours.step(action) == await theirs.step(action)
            await ours.close()
            await theirs.close()
            async with asyncio.timeout(10):
                while (await there.info()).capacity.sessions:
                    await asyncio.sleep(0.01)
        await unregister(http, registered)


async def test_names_and_seeds_are_those_that_gem_knows(http: httpx.AsyncClient) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        for base in (url, f"{url}/apis/v1/envs/gem"):
            answer.calls.clear()
            registered = await register(http, base, upstream_env_id="game:Box-v0")
            assert answer.named("make") == [{"env_id": "game:Box-v0"}] * 2
            session = {"env_id": "Box", "reset": {"seed": 2**40 + 7}}
            made = (await http.post("/v1/sessions", json=session)).json()
            assert answer.named("reset")[-1]["seed"] == 7, "NumPy's generator takes no larger ones"
            await http.delete(f"/v1/sessions/{made['session_id']}")
            async with asyncio.timeout(10):
                while len(answer.named("close")) < 3:
                    await asyncio.sleep(0.01)
            refused = await http.post("/v1/sessions", json={"env_id": "Box", "kwargs": {"size": 3}})
            assert refused.json()["code"] == "invalid_kwargs"
            await unregister(http, registered)


@pytest.mark.parametrize(
    ("paths", "check", "detail"),
    [
        ({"make": plain({"detail": "no image"}, 500)}, "make", "no image"),
        ({"make": {"status": "Failed", "message": "invalid parameter", "error": "env_id"}}, "make", "env_id"),
        ({"make": {"sandbox_id": ""}}, "make", "without a sandbox_id"),
        ({"make": []}, "make", "not with an object"),
        ({"make": plain({}, 302, Location="http://169.254.169.254/")}, "make", "redirects"),
        ({"reset": {"info": {}}}, "reset", "no observation"),
        ({"reset": {"observation": "", "info": 3}}, "reset", "info is not an object"),
        ({"reset": plain({"detail": "bad seed"}, 500)}, "reset", "GemError: bad seed"),
        ({"step": {**STEP, "reward": "much"}}, "step", "not a finite number"),
        ({"step": {**STEP, "truncated": None}}, "step", "booleans"),
        ({"step": plain(b"x" * 9_000_000)}, "step", "larger than"),
        ({"close": plain({}, 404)}, "close", "answered 404"),
    ],
)
async def test_the_probe_says_what_is_wrong(
    http: httpx.AsyncClient, paths: dict[str, Any], check: str, detail: str
) -> None:
    answer: Any = Gem(**paths)
    async with scripted(answer) as url:
        refused = await register(http, url)
    assert refused["code"] == "probe_failed", refused
    failed = [each for each in refused["report"] if not each["ok"]]
    assert [each["check"] for each in failed] == [check]
    assert detail in failed[0]["detail"]
    if check in ("reset", "step"):
        assert answer.named("close") == [{"sandbox_id": "box-1"}]


async def test_a_sandbox_that_failed_is_not_used_again(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        registered = await register(http, url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            session = await client.make("Box")
            await session.reset(seed=1)
            answer.paths["step"] = plain({"detail": "it crashed", "traceback": ["secret"]}, 500)
            with pytest.raises(ProblemError, match="it crashed") as caught:
                await session.step("a")
            assert caught.value.code == "env_error"
            assert "secret" not in json.dumps(caught.value.to_problem())
            answer.paths.clear()
            await session.reset(seed=1)
            assert [body["sandbox_id"] for body in answer.named("reset")[-2:]] == ["box-3", "box-4"]
            assert answer.named("close")[-1] == {"sandbox_id": "box-3"}
            assert (await session.step("a")).observation == "on"
        await unregister(http, registered)


BAD = [
    plain(b"<html>"),
    plain({}, 502),
    plain({"detail": "unknown field"}, 422),
    {"status": "Failed", "message": "invalid parameter", "error": "action"},
    {"observation": "on"},
    {**STEP, "reward": None},
    {**STEP, "info": 3},
    [],
    plain(b"[" * 100_000),
    plain(b"x" * 9_000_000),
]


async def test_bad_answers_to_steps_cost_no_session(gateway: ServerProcess, http: httpx.AsyncClient) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        registered = await register(http, url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            session = await client.make("Box")
            await session.reset(seed=1)
            answer.calls.clear()
            for bad in BAD:
                answer.paths["step"] = bad
                with pytest.raises(ProblemError) as caught:
                    await session.step("a")
                assert caught.value.code == "upstream_error", bad
                assert "may have been taken" in caught.value.detail
                answer.paths.clear()
                assert (await session.step("a")).observation == "on"
            assert answer.calls == [("step", {"sandbox_id": "box-3", "action": "a"})] * 2 * len(BAD)
            await session.close()
        await unregister(http, registered)


async def test_a_reset_that_is_answered_badly_leaves_nothing_behind(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        registered = await register(http, url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            session = await client.make("Box")
            answer.paths["reset"] = {"no": "observation"}
            with pytest.raises(ProblemError, match="upstream_error"):
                await session.reset(seed=1)
            answer.paths.clear()
            await session.reset(seed=1)
            assert answer.named("close")[-1] == {"sandbox_id": "box-3"}
            assert (await session.step("a")).observation == "on"
            await session.close()
        await unregister(http, registered)


@pytest.mark.parametrize("status", [404, 410])
async def test_a_server_without_the_sandbox_has_lost_it(
    gateway: ServerProcess, http: httpx.AsyncClient, status: int
) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        registered = await register(http, url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            session = await client.make("Box")
            answer.paths["reset"] = plain({"detail": "no such sandbox"}, status)
            beginning = asyncio.create_task(session.reset(seed=1))
            async with asyncio.timeout(20):
                while len(answer.named("reset")) < 3:
                    await asyncio.sleep(0.01)
            del answer.paths["reset"]
            assert (await beginning).observation == "begin", "between episodes it is made anew"
            answer.paths["step"] = plain({"detail": "no such sandbox"}, status)
            with pytest.raises(ProblemError) as caught:
                await session.step("a")
            assert (caught.value.code, caught.value.extra["reason"]) == ("session_gone", "lost")
        await unregister(http, registered)


async def test_a_server_that_says_later_is_asked_later(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    gem: Any = Gem()
    refusals = [429, 503]

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/step") and "later" in body.values() and refusals:
            return plain({"detail": "busy"}, refusals.pop())
        return gem(path, body)

    async with scripted(answer) as url:
        registered = await register(http, url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            session = await client.make("Box")
            await session.reset(seed=1)
            assert (await session.step("later")).observation == "on"
            assert not refusals
            assert len(gem.named("make")) == 3
            await session.close()
        await unregister(http, registered)


async def test_a_sandbox_that_is_made_for_nobody_is_ended(http: httpx.AsyncClient) -> None:
    """Its session ends while it is being made, and nobody knows its id before it is."""
    gem: Any = Gem()
    made, being_made = asyncio.Event(), asyncio.Event()

    async def answer(path: str, body: dict[str, Any]) -> Said:
        if path.endswith("/make") and len(gem.named("make")) == 3:
            being_made.set()
            await made.wait()
        said: Said = gem(path, body)
        return said

    async with scripted(answer) as url:
        registered = await register(http, url)
        session = (await http.post("/v1/sessions", json={"env_id": "Box", "reset": {}})).json()["session_id"]
        gem.paths["step"] = plain({"detail": "it crashed"}, 500)
        await http.post(f"/v1/sessions/{session}/step", json={"action": "a"})
        begins = asyncio.create_task(http.post(f"/v1/sessions/{session}/reset", json={}))
        await asyncio.wait_for(being_made.wait(), 20)
        assert (await http.delete(f"/v1/sessions/{session}")).status_code == 204
        assert (await begins).json()["code"] == "session_gone"
        made.set()
        async with asyncio.timeout(20):
            while {"sandbox_id": "box-4"} not in gem.named("close"):
                await asyncio.sleep(0.01)
        await unregister(http, registered)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_server_is_no_broken_one(http: httpx.AsyncClient, status: int) -> None:
    answer: Any = Gem()
    async with scripted(answer) as url:
        registered = await register(http, url)
        answer.paths["make"] = plain({"detail": "no room"}, status)
        full = await http.post("/v1/sessions", json={"env_id": "Box"})
        assert (full.status_code, full.json()["code"]) == (503, "at_capacity")
        assert "Retry-After" in full.headers
        answer.paths.clear()
        assert (await http.post("/v1/sessions", json={"env_id": "Box"})).status_code == 201
        await unregister(http, registered)


async def test_observations_that_are_no_text_arrive_as_json(http: httpx.AsyncClient) -> None:
    answer: Any = Gem(reset={"observation": {"cells": [1, 2]}, "info": {"a": 1, "ns": [2**60]}})
    async with scripted(answer) as url:
        registered = await register(http, url)
        made = (await http.post("/v1/sessions", json={"env_id": "Box", "reset": {}})).json()
        assert made["reset"]["observation"] == '{"cells":[1,2]}'
        assert made["reset"]["info"] == {"a": 1, "ns": [str(2**60)]}, "larger than our integers"
        await unregister(http, registered)


async def test_an_observation_that_is_nested_too_deeply_is_a_failure_of_its_server(
    http: httpx.AsyncClient,
) -> None:
    gem = Gem()
    async with scripted(gem) as url:
        registered = await register(http, url)
        made = (await http.post("/v1/sessions", json={"env_id": "Box", "reset": {"seed": 1}})).json()
        deep: Any = "end"
        for _ in range(300):
            deep = [deep]
        gem.paths["step"] = {**STEP, "observation": deep}
        stepped = await http.post(f"/v1/sessions/{made['session_id']}/step", json={"action": "a"})
        assert stepped.json()["code"] == "upstream_error"
        await unregister(http, registered)
