"""Gateways that share no journal: what one of them cannot know it does not make up, and the client restores it."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player, sessions_at, undisturbed
from tests.support.journal_fleet import GATEWAY, QUIET, WALKS, Fleet, whole_at


@pytest.fixture(scope="module")
def gateways() -> Iterator[list[ServerProcess]]:
    with ServerProcess(GATEWAY) as one, ServerProcess(GATEWAY) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def nodes(
    gateways: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    node = (*WALKS, *QUIET, *(part for each in gateways for part in ("--register", each.url)))
    state = str(tmp_path_factory.mktemp("state"))
    with ServerProcess((*node, "--state-dir", state)) as one, ServerProcess(node) as other:
        asyncio.run(whole_at(gateways, 2))
        yield [one, other]


async def at_first_node(fleet: Fleet) -> Player:
    """A session at the node that will be killed."""
    while True:
        async with httpx.AsyncClient(base_url=fleet.nodes[0].url) as http:
            before = (await http.get("/v1/info")).json()["capacity"]["sessions"]
            player = await Player(fleet.gateways[0].url, risk=0.0).begin(5)
            if (await http.get("/v1/info")).json()["capacity"]["sessions"] > before:
                return player
        await player.http.aclose()


async def ten_steps(fleet: Fleet) -> Player:
    player = await at_first_node(fleet)
    for number in range(10):
        await player.step(str(number), url=fleet.gateways[number >= 5].url)
    return player


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_gateway_does_not_go_back_behind_steps_of_another_one(
    gateways: list[ServerProcess], nodes: list[ServerProcess], numbered: bool
) -> None:
    player = await ten_steps(Fleet(None, gateways, nodes))  # type: ignore[arg-type]
    nodes[0].kill()
    try:
        body = {"action": "10"} | ({"episode": 0, "step": 10} if numbered else {})
        with pytest.raises(ProblemError, match="session_gone") as gone:
            await player.ask("POST", f"/v1/sessions/{player.session_id}/step", body)
        assert gone.value.extra["reason"] == "lost"
    finally:
        nodes[0].start()
        await whole_at(gateways, 2)
    # Its node is back with all of it, and the gateway that said nothing of it goes on.
    await player.step("10", url=gateways[1].url)
    assert player.seen == await undisturbed(nodes[1].url, 5, [str(each) for each in range(11)], risk=0.0)
    await player.http.aclose()


async def test_the_client_restores_what_is_lost(
    gateways: list[ServerProcess], nodes: list[ServerProcess]
) -> None:
    async with EnvClient(gateways[0].url) as client, EnvClient(nodes[1].url) as direct:
        sessions = [await client.make("Walk-v0", {"risk": 0.0}) for _ in range(4)]
        twins = [await direct.make("Walk-v0", {"risk": 0.0}) for _ in range(4)]
        for seed, pair in enumerate(zip(sessions, twins, strict=True)):
            assert await pair[0].reset(seed=seed) == await pair[1].reset(seed=seed)
        for number in range(6):
            if number == 3:
                nodes[0].kill()
            steps = await asyncio.gather(*(each.step(str(number)) for each in (*sessions, *twins)))
            assert steps[:4] == steps[4:]
        nodes[0].start()
        await whole_at(gateways, 2)


def registered_by_hand(gateway: ServerProcess, node: ServerProcess) -> None:
    body = {"env_id": "Walk-v0", "url": node.url, "protocol": "rollgym", "ttl_s": 600}
    answer = httpx.post(f"{gateway.url}/v1/envs", json=body, timeout=60)
    assert answer.status_code == 201, answer.text


class Alone(NamedTuple):
    """A gateway that had moved a session when it was started anew, and whose node is back with its old copy."""

    gateway: ServerProcess
    second: ServerProcess
    player: Player


@pytest.fixture
async def alone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Alone]:
    kept = ("--state-dir", str(tmp_path / "gateway")) if request.param != "keeps nothing" else ()
    with (
        ServerProcess((*GATEWAY, *kept)) as gateway,
        ServerProcess((*WALKS, *QUIET, "--state-dir", str(tmp_path / "node"))) as first,
        ServerProcess((*WALKS, *QUIET)) as second,
    ):
        registered_by_hand(gateway, first)
        player = await Player(gateway.url, risk=0.0).begin(5)
        registered_by_hand(gateway, second)
        for number in range(2):
            await player.step(str(number))
        first.kill()
        if request.param == "has a full disk":
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (0, 0))
        for number in range(2, 5):
            await player.step(str(number))
        gateway.kill()
        first.start()
        gateway.start()
        for node in (first, second):
            registered_by_hand(gateway, node)
        yield Alone(gateway, second, player)
        await player.http.aclose()


@pytest.mark.parametrize("alone", ["keeps nothing", "has a full disk"], indirect=True)
async def test_a_gateway_alone_does_not_take_a_copy_of_the_past_for_the_session(alone: Alone) -> None:
    player = alone.player
    path = f"/v1/sessions/{player.session_id}/step"
    with pytest.raises(ProblemError, match=r"upstream_error.*name its episode and step"):
        await player.ask("POST", path, {"action": "5"})
    with pytest.raises(ProblemError, match="step_mismatch") as behind:
        await player.step("5")
    assert (behind.value.extra["episode"], behind.value.extra["step"]) == (0, 2)


@pytest.mark.parametrize("alone", ["keeps its state"], indirect=True)
async def test_a_gateway_alone_that_keeps_its_state_knows_where_sessions_went_on(alone: Alone) -> None:
    player = alone.player
    path = f"/v1/sessions/{player.session_id}"
    player.seen.append(await player.ask("POST", f"{path}/step", {"action": "5"}))
    await player.step("6")
    assert player.seen == await undisturbed(
        alone.second.url, 5, [str(number) for number in range(7)], risk=0.0
    )
    alone.gateway.kill()
    alone.gateway.start()
    registered_by_hand(alone.gateway, alone.second)
    await player.ask("DELETE", path)
    async with asyncio.timeout(20):
        while await sessions_at([alone.second]):
            await asyncio.sleep(0.05)
