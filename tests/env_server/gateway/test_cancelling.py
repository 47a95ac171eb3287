"""Cancelling what runs on a session behind a gateway: also what waits there, and what no node answers any more."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import websockets

from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player, undisturbed
from tests.support.journal_fleet import GATEWAY, QUIET, WALKS, whole_at
from tests.support.redis_server import RedisServer

SLOW = ("--no-builtin", "--env", "Slow-v0=tests.support.client_envs:Slow", "--isolation", "Slow-v0=thread")


@pytest.fixture(scope="module", params=["alone", "with a journal"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    if request.param == "alone":
        with ServerProcess(GATEWAY) as running:
            yield running
        return
    with (
        RedisServer(tmp_path_factory.mktemp("journal")) as journal,
        ServerProcess((*GATEWAY, "--journal-url", journal.url)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def node(gateway: ServerProcess) -> Iterator[ServerProcess]:
    with ServerProcess((*SLOW, *QUIET, "--register", gateway.url)) as running:
        asyncio.run(whole_at([gateway], 1))
        yield running


async def begin(gateway: ServerProcess, players: list[Player]) -> Player:
    player = await Player(gateway.url, "Slow-v0", risk=0.0).begin(3)
    players.append(player)
    return player


async def unnumbered(player: Player, action: str) -> Any:
    return await player.ask("POST", f"/v1/sessions/{player.session_id}/step", {"action": action})


async def cancel(player: Player) -> Any:
    return await player.ask("POST", f"/v1/sessions/{player.session_id}/cancel")


async def is_cancelled(asked: "asyncio.Task[Any]") -> bool:
    with pytest.raises(ProblemError) as problem:
        async with asyncio.timeout(5):
            await asked
    return (problem.value.code, problem.value.extra) == ("step_timeout", {"cancelled": True})


@pytest.mark.parametrize("numbered", [True, False])
async def test_what_waits_for_its_node_is_cancelled_and_not_taken_later(
    gateway: ServerProcess, node: ServerProcess, players: list[Player], numbered: bool
) -> None:
    player = await begin(gateway, players)
    await player.step("a")
    node.kill()
    try:
        first = asyncio.create_task(player.step("b") if numbered else unnumbered(player, "b"))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(unnumbered(player, "c"))
        await asyncio.sleep(0.2)
        cancelling = asyncio.create_task(cancel(player))
        # Before the node is back.
        assert await is_cancelled(first)
        assert await is_cancelled(second)
    finally:
        await asyncio.to_thread(node.start)
        await whole_at([gateway], 1)
    # A node that takes long to start is not waited for.
    await asyncio.wait([cancelling])
    described = await player.ask("GET", f"/v1/sessions/{player.session_id}")
    assert (described["episode"], described["step"]) == (0, 1)
    player.seen = [await player.ask("POST", f"/v1/sessions/{player.session_id}/reset", {"seed": 3})]
    await player.step("b")
    seen = await undisturbed(node.url, 3, ["b"], env_id="Slow-v0", risk=0.0)
    assert [each["observation"] for each in player.seen] == [each["observation"] for each in seen]


async def test_what_a_node_dies_with_is_not_asked_for_again_once_it_is_cancelled(
    gateway: ServerProcess, node: ServerProcess, players: list[Player]
) -> None:
    player = await begin(gateway, players)
    node.pause()
    step = asyncio.create_task(player.step("a"))
    await asyncio.sleep(0.3)
    cancelling = asyncio.create_task(cancel(player))
    await asyncio.sleep(0.3)
    node.kill()
    try:
        assert await is_cancelled(step)
    finally:
        await asyncio.to_thread(node.start)
        await whole_at([gateway], 1)
    # A node that takes long to start is not waited for.
    await asyncio.wait([cancelling])
    assert (await player.ask("GET", f"/v1/sessions/{player.session_id}"))["step"] == 0


async def test_steps_in_a_line_are_cancelled_with_the_one_that_runs(
    gateway: ServerProcess, node: ServerProcess, players: list[Player]
) -> None:
    player = await begin(gateway, players)
    running = asyncio.create_task(unnumbered(player, "sleep 15"))
    await asyncio.sleep(0.3)
    waiting = [asyncio.create_task(unnumbered(player, "a")) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert await cancel(player) == {}
    assert await is_cancelled(running)
    for each in waiting:
        # A gateway without a journal has passed them on to the node, which ran one already.
        with pytest.raises(ProblemError) as problem:
            await each
        assert problem.value.code in ("step_timeout", "busy")
    assert (await player.ask("GET", f"/v1/sessions/{player.session_id}"))["step"] == 0


def named_call(message_id: int, action: str) -> dict[str, Any]:
    call = {"name": "step", "arguments": {"action": action}}
    return {"jsonrpc": "2.0", "id": message_id, "method": "tools/call", "params": call}


async def test_a_cancellation_by_name_concerns_the_call_of_this_name_alone(
    gateway: ServerProcess, node: ServerProcess
) -> None:
    """Of one that runs, and of one that waits behind it or is refused."""
    accepted = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=accepted, timeout=60) as http:
        hello = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "a", "version": "1"},
        }
        path = "/mcp/Slow-v0?seed=3"
        begun = await http.post(
            path, json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
        )
        http.headers["Mcp-Session-Id"] = begun.headers["Mcp-Session-Id"]

        async def tell(message: dict[str, Any]) -> httpx.Response:
            return await http.post("/mcp/Slow-v0", json=message)

        async def cancelled(message_id: int) -> None:
            params = {"requestId": message_id}
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            assert (await tell(message)).status_code == 202

        for cancelled_one in (1, 2):
            first = asyncio.create_task(tell(named_call(1, "sleep 2")))
            await asyncio.sleep(0.5)
            second = asyncio.create_task(tell(named_call(2, "a")))
            await asyncio.sleep(0.3)
            await cancelled(cancelled_one)
            answers = [(await each).json() for each in (first, second)]
            assert answers[0]["result"]["isError"] is (cancelled_one == 1), answers
            # Behind one that was cancelled, there is no episode any more.
            assert answers[1]["result"]["isError"], answers
            begun = await tell({**named_call(3, ""), "params": {"name": "reset", "arguments": {}}})
            assert not begun.json()["result"]["isError"], begun.text
        assert (await http.delete("/mcp/Slow-v0")).status_code == 204


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("numbered", [True, False])
async def test_a_gateway_that_ends_does_not_say_of_a_step_that_nothing_was_done(
    numbered: bool, shares: bool, players: list[Player], tmp_path: Path
) -> None:
    """A node that runs it may take it. One that names its place may be asked for again."""
    with (
        RedisServer(tmp_path) as journal,
        ServerProcess(
            (*GATEWAY, "--drain-grace-s", "0.5", *(("--journal-url", journal.url) if shares else ()))
        ) as gateway,
        ServerProcess((*SLOW, *QUIET, "--register", gateway.url)),
    ):
        await whole_at([gateway], 1)
        player = await begin(gateway, players)
        place = {"episode": 0, "step": 0} if numbered else {}
        url = f"{gateway.url}/v1/sessions/{player.session_id}/step"
        async with httpx.AsyncClient(timeout=30) as http:
            asking = asyncio.create_task(http.post(url, json={"action": "sleep 10", **place}))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(gateway.stop)
            problem = (await asking).json()
    assert problem["code"] == ("draining" if numbered else "upstream_error"), problem
    assert ("whether the step was taken is not known" in problem["detail"]) is not numbered


async def test_a_step_of_a_batch_that_is_cancelled_is_not_sent_again_when_its_node_dies(
    players: list[Player],
) -> None:
    """The batch was passed on whole; the step beside it, which nobody cancelled, is taken once it is back."""
    with (
        ServerProcess(GATEWAY) as gateway,
        ServerProcess((*WALKS, *QUIET, "--register", gateway.url)) as node,
    ):
        await whole_at([gateway], 1)
        both = [await Player(gateway.url, risk=0.0).begin(seed) for seed in (3, 4)]
        players.extend(both)
        place = {"op": "step", "episode": 0, "step": 0}
        steps = [{**place, "session_id": each.session_id, "action": "a"} for each in both]
        frames = [
            {"id": 1, "op": "batch", "ops": steps},
            {"id": 2, "op": "cancel", "session_id": both[0].session_id},
            {"id": 3, "op": "ping"},
        ]
        async with websockets.connect(f"{gateway.url.replace('http', 'ws', 1)}/v1/ws") as socket:
            node.pause()
            for frame in frames:
                await socket.send(orjson.dumps(frame))
            # Frames are read in their order: what comes before it has gone to the node.
            assert orjson.loads(await socket.recv())["id"] == 3
            node.kill()
            await asyncio.to_thread(node.start)
            answers = {}
            while len(answers) < 2:
                answer = orjson.loads(await socket.recv())
                answers[answer["id"]] = answer
        cancelled, taken = answers[1]["results"]
        assert (cancelled["error"]["code"], cancelled["error"]["cancelled"]) == ("step_timeout", True)
        assert taken["ok"]["step"] == 1
        described = await both[0].ask("GET", f"/v1/sessions/{both[0].session_id}")
        assert (described["episode"], described["step"]) == (0, 0)


@pytest.mark.parametrize("twice", [False, True])
async def test_a_gateway_that_ends_does_not_say_of_a_batch_that_nothing_was_done(
    players: list[Player], twice: bool
) -> None:
    """Whether it is passed on whole, or in parts because of a session that is in it twice."""
    with (
        ServerProcess((*GATEWAY, "--drain-grace-s", "0.5")) as gateway,
        ServerProcess((*WALKS, *QUIET, "--register", gateway.url)) as node,
    ):
        await whole_at([gateway], 1)
        both = [await Player(gateway.url, risk=0.0).begin(seed) for seed in (3, 4)]
        players.extend(both)
        unnumbered, numbered = ({"op": "step", "session_id": each.session_id, "action": "a"} for each in both)
        steps = [unnumbered, numbered | {"episode": 0, "step": 0}, *([unnumbered] if twice else [])]
        async with websockets.connect(f"{gateway.url.replace('http', 'ws', 1)}/v1/ws") as socket:
            node.pause()
            for frame in ({"id": 1, "op": "batch", "ops": steps}, {"id": 2, "op": "ping"}):
                await socket.send(orjson.dumps(frame))
            # Frames are read in their order: what comes before it has gone to the node.
            assert orjson.loads(await socket.recv())["id"] == 2
            await asyncio.to_thread(gateway.stop)
            node.resume()
            answer = orjson.loads(await socket.recv())
    assert answer["id"] == 1
    problems = [result["error"] for result in answer.get("results", [])]
    # The third one waited for the first, and was not sent.
    expected = ["upstream_error", "draining", *(["draining"] if twice else [])]
    assert [problem["code"] for problem in problems] == expected, answer
    assert "whether the step was taken is not known" in problems[0]["detail"]
