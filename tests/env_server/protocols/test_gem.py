"""The adapter for GEM's clients: a sandbox is a session, whichever I/O process is asked."""

import asyncio
from typing import Any

import httpx

from tests.support.wire import Server

GEM = "/apis/v1/envs/gem"


async def gem(client: httpx.AsyncClient, call: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(f"{GEM}/{call}", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


async def test_an_episode_is_that_of_our_own_protocol(anywhere: Server) -> None:
    async with anywhere.socket() as ours, anywhere.http() as client:
        session = await ours.call("make", env_id="Count", reset={"seed": 4})
        sandbox_id = (await gem(client, "make", env_id="Count"))["sandbox_id"]
        began = await gem(client, "reset", sandbox_id=sandbox_id, seed=4)
        assert began == {name: session["reset"][name] for name in ("observation", "info")}
        for text in ("é", "b", "c"):
            step = await ours.call("step", session_id=session["session_id"], action=text)
            seen = await gem(client, "step", sandbox_id=sandbox_id, action=text)
            assert seen == {name: step[name] for name in seen}
            assert seen.keys() == {"observation", "reward", "terminated", "truncated", "info"}
        assert seen["terminated"]
        assert await gem(client, "close", sandbox_id=sandbox_id) == {"sandbox_id": sandbox_id}
        assert await gem(client, "close", sandbox_id=sandbox_id) == {"sandbox_id": sandbox_id}
        await ours.call("close", session_id=session["session_id"])
        assert (await client.get("/v1/sessions")).json()["sessions"] == []


async def test_calls_reach_the_process_that_owns_the_sandbox(plain: Server) -> None:
    """Every call is a connection of its own, which the kernel gives to either process."""
    sandboxes: dict[str, str] = {}
    async with asyncio.timeout(60):
        while len(sandboxes) < 2:
            async with plain.http() as client:
                made = await gem(client, "make", env_id="Count", kwargs={"length": 100})
            sandboxes[made["sandbox_id"]] = made["sandbox_id"].partition(".")[0]
            if len(set(sandboxes.values())) < len(sandboxes):
                async with plain.http() as client:
                    await gem(client, "close", sandbox_id=made["sandbox_id"])
                del sandboxes[made["sandbox_id"]]
    for sandbox_id in sandboxes:
        async with plain.http() as client:
            await gem(client, "reset", sandbox_id=sandbox_id, seed=1)
        for number in range(1, 9):
            async with plain.http() as client:
                seen = await gem(client, "step", sandbox_id=sandbox_id, action="special")
                assert seen["info"]["count"] == number
                assert seen["info"]["nan"] == "NaN"
        async with plain.http() as client:
            await gem(client, "close", sandbox_id=sandbox_id)


async def test_actions_that_are_no_text_may_come_as_text(plain: Server) -> None:
    async with plain.http() as client:
        sandbox_id = (await gem(client, "make", env_id="Arrays"))["sandbox_id"]
        await gem(client, "reset", sandbox_id=sandbox_id)
        action = {"push": [0.5, 0.25], "key": 2}
        for form in (action, '{"push": [0.5, 0.25], "key": 2}'):
            assert (await gem(client, "step", sandbox_id=sandbox_id, action=form))["reward"] == 0.75
        for form in ("left", '{"push": [0.5]}', '{"push": [0.5, 0.25], "key": 9}', 3):
            refused = await client.post(f"{GEM}/step", json={"sandbox_id": sandbox_id, "action": form})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_action")
        await gem(client, "close", sandbox_id=sandbox_id)


async def test_the_list_is_the_catalog(plain: Server) -> None:
    async with plain.http() as client:
        catalog = [info["env_id"] for info in (await client.get("/v1/envs")).json()["envs"]]
        assert (await gem(client, "list", sandbox_id="any"))["env_id"] == catalog
        assert (await gem(client, "list"))["env_id"] == catalog


async def test_failures_say_what_is_wrong(plain: Server) -> None:
    async with plain.http() as client:
        sandbox_id = (await gem(client, "make", env_id="Count"))["sandbox_id"]
        for call, body, status in (
            ("make", {}, 422),
            ("make", {"env_id": "Coumt"}, 404),
            ("make", {"env_id": "Count", "kwargs": {"length": 0}}, 422),
            ("reset", {"sandbox_id": ""}, 422),
            ("reset", {"sandbox_id": "0.none"}, 404),
            ("reset", {"sandbox_id": "1.none"}, 404),
            ("reset", {"sandbox_id": sandbox_id, "seed": "four"}, 422),
            ("step", {"sandbox_id": sandbox_id, "action": "a"}, 409),
            ("step", {"sandbox_id": sandbox_id}, 422),
            ("none", {}, 404),
        ):
            answer = await client.post(f"{GEM}/{call}", json=body)
            assert answer.status_code == status, (call, body, answer.text)
            assert answer.json()["detail"]
        await gem(client, "reset", sandbox_id=sandbox_id)
        raised = await client.post(f"{GEM}/step", json={"sandbox_id": sandbox_id, "action": "raise"})
        assert raised.status_code == 500
        assert "secret" not in raised.text
        await gem(client, "close", sandbox_id=sandbox_id)


async def test_sandboxes_are_their_tokens(guarded: tuple[Server, dict[str, str]]) -> None:
    server, tokens = guarded
    async with server.http(tokens["alice"]) as alice, server.http(tokens["bob"]) as bob:
        sandbox_id = (await gem(alice, "make", env_id="Count"))["sandbox_id"]
        for call in ("reset", "step"):
            body = {"sandbox_id": sandbox_id, "action": "a"}
            assert (await bob.post(f"{GEM}/{call}", json=body)).status_code == 404
        await gem(bob, "close", sandbox_id=sandbox_id)
        await gem(alice, "reset", sandbox_id=sandbox_id)
        await gem(bob, "make", env_id="Count")
        full = await alice.post(f"{GEM}/make", json={"env_id": "Count"})
        assert (full.status_code, full.json()["code"]) == (503, "at_capacity")
        assert int(full.headers["retry-after"]) > 0
        async with asyncio.timeout(20):
            # Nobody uses them, so they are evicted.
            while (await alice.post(f"{GEM}/make", json={"env_id": "Count"})).status_code == 503:
                await asyncio.sleep(0.1)
        gone = await alice.post(f"{GEM}/reset", json={"sandbox_id": sandbox_id})
        assert (gone.status_code, gone.json()["reason"]) == (410, "evicted")
    async with server.http() as nobody:
        assert (await nobody.post(f"{GEM}/list", json={})).status_code == 401
