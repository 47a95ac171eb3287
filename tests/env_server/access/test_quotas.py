"""What one token, one address and one connection may use."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from rollgym.env_server.access.tokens import Quota, add_token
from tests.support.foreign_servers import ForeignServer
from tests.support.wire import ENVS, INLINE, Server

Guarded = tuple[Server, dict[str, str]]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("quotas") / "tokens.yaml"
    quotas = {
        "wide": Quota(),
        "two": Quota(max_sessions=2, max_sockets=2),
        "slow": Quota(rate_limit=0.5),
    }
    tokens = {name: add_token(file, name, ["play"], quota) for name, quota in quotas.items()}
    arguments = ("--max-unauthenticated-sockets", "3", "--auth-timeout-s", "1.5")
    with Server(*ENVS, *INLINE, "--token-file", str(file), *arguments) as server:
        yield server, tokens


def bearer(token: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), problem
    assert int(answer.headers["retry-after"]) == problem["retry_after"] >= 1
    return problem


async def test_sessions_of_a_token(guarded: Guarded) -> None:
    server, tokens = guarded
    async with server.http(tokens["two"]) as two, server.http(tokens["wide"]) as wide:
        made = await two.post("/v1/sessions", json={"env_id": "Count", "count": 2})
        assert made.status_code == 201
        refused = check(await two.post("/v1/sessions", json={"env_id": "Count"}), 503, "at_capacity")
        assert refused["limit"] == "max_sessions_per_token"
        assert (await wide.post("/v1/sessions", json={"env_id": "Count", "count": 3})).status_code == 201
        ids = [each["session_id"] for each in made.json()["sessions"]]
        await two.post("/v1/sessions/close", json={"session_ids": ids})
        assert (await two.post("/v1/sessions", json={"env_id": "Count"})).status_code == 201


async def test_the_rate_of_a_token(guarded: Guarded) -> None:
    server, tokens = guarded
    async with server.http(tokens["slow"]) as slow, server.http(tokens["wide"]) as wide:
        # The bucket holds one operation, and is full again after two seconds.
        answers = [await slow.post("/v1/sessions", json={"env_id": "Count"}) for _ in range(8)]
        good = [answer for answer in answers if answer.status_code == 201]
        refused = [answer for answer in answers if answer.status_code != 201]
        assert good
        for answer in refused:
            check(answer, 429, "rate_limited")
        assert refused
        for _ in range(20):
            assert (await wide.get("/v1/info")).status_code == 200, "another token has a bucket of its own"
        listed = (await wide.get("/v1/sessions")).json()["sessions"]
        assert all(each["owner"] == "wide" for each in listed)
    async with server.socket(**bearer(tokens["slow"])) as socket:
        results = await socket.batch(*({"op": "make", "env_id": "Count"} for _ in range(6)))
        assert [result["error"]["code"] for result in results if "error" in result][-4:] == [
            "rate_limited"
        ] * 4


async def test_sockets_of_a_token(guarded: Guarded) -> None:
    server, tokens = guarded
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(server.socket(**bearer(tokens["two"])))
        with pytest.raises(websockets.InvalidStatus) as refused:
            await stack.enter_async_context(server.socket(**bearer(tokens["two"])))
        assert refused.value.response.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        late = await stack.enter_async_context(server.socket())
        problem = (await late.ask("auth", token=tokens["two"]))["error"]
        assert (problem["code"], problem["limit"]) == ("at_capacity", "max_sockets_per_token")
        other = await stack.enter_async_context(server.socket(**bearer(tokens["wide"])))
        assert await other.call("ping") == {}
    await freed(server, tokens["two"])


async def freed(server: Server, token: str) -> None:
    """Wait until the server has seen that sockets are gone."""
    async with asyncio.timeout(20):
        while True:
            try:
                async with server.socket(**bearer(token)) as socket:
                    assert await socket.call("ping") == {}
                return
            except websockets.InvalidStatus:
                await asyncio.sleep(0.01)


async def test_strangers_are_few_and_have_little_time(guarded: Guarded) -> None:
    server, tokens = guarded
    async with AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(server.socket()) for _ in range(3)]
        with pytest.raises(websockets.InvalidStatus) as refused:
            await stack.enter_async_context(server.socket())
        assert refused.value.response.status_code == 503
        known = await stack.enter_async_context(server.socket(**bearer(tokens["wide"])))
        assert await known.call("ping") == {}, "who brings a token is no stranger"
        assert await strangers[0].call("auth", token=tokens["wide"]) == {}
        assert (await strangers[1].receive())["error"]["code"] == "unauthorized", "no token came in time"
        with pytest.raises(websockets.ConnectionClosed):
            await strangers[1].receive()
        assert await strangers[0].call("ping") == {}, "the time is for the token only"
        again = await stack.enter_async_context(server.socket())
        assert await again.call("auth", token=tokens["wide"]) == {}


async def test_registrations_of_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    token = add_token(file, "author", ["register"], Quota(max_registrations=2))
    other = add_token(file, "other", ["register"])
    arguments = ("--gateway", "--allow-network", "loopback", "--token-file", str(file))
    with ForeignServer("python") as upstream, Server(*arguments) as server:
        async with server.http(token) as author, server.http(other) as somebody:
            bodies = [{"env_id": f"Guess{n}", "url": upstream.url, "protocol": "http"} for n in range(3)]
            answers = await asyncio.gather(*(author.post("/v1/envs", json=body) for body in bodies))
            assert sorted(answer.status_code for answer in answers) == [201, 201, 503]
            (refused,) = (answer for answer in answers if answer.status_code == 503)
            assert check(refused, 503, "at_capacity")["limit"] == "max_registrations_per_token"
            good = [body for body, answer in zip(bodies, answers, strict=True) if answer.status_code == 201]
            assert (await author.post("/v1/envs", json=good[0])).status_code == 201, "renewing takes no place"
            (bad,) = (body for body in bodies if body not in good)
            assert (await somebody.post("/v1/envs", json=bad)).status_code == 201
