"""OpenEnv's own clients on our servers, and our client on OpenEnv's own server behind our gateway."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from tests.support.peer_processes import PeerServer, play
from tests.support.solved import Solved, solve
from tests.support.wire import Server

GAMES = ("FrozenLake-v0", "Sokoban-v0")
CLIENTS = ("generic", "typed")


class Played(NamedTuple):
    """What our client has solved, and what OpenEnv's clients have seen: of games by id and client, and else."""

    solved: dict[str, Solved]
    games: dict[tuple[str, str], dict[str, Any]]
    balanced: dict[str, Any]
    full: dict[str, Any]


@pytest.fixture(scope="module")
def played(server: Server, openenv: Path) -> Played:
    """All that OpenEnv's clients play here, in one process: its packages take seconds to import."""
    solved = {env_id: asyncio.run(solve(server.url, env_id, seed=11)) for env_id in GAMES}
    games = list(itertools.product(GAMES, CLIENTS))
    with Server("--max-sessions", "1") as small:
        jobs: list[tuple[Any, ...]] = [
            (client, f"{server.url}/openenv/{env_id}", 11, solved[env_id].actions) for env_id, client in games
        ]
        jobs.append(("generic", f"{server.url}/openenv/CartPole-v1", 5, [0, 1, 1]))
        jobs.append(("full", f"{small.url}/openenv/FrozenLake-v0"))
        *seen, balanced, full = play(openenv, "openenv_player.py", json.dumps(jobs))
    return Played(solved, dict(zip(games, seen, strict=True)), balanced, full)


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("env_id", GAMES)
def test_openenvs_clients_solve_what_ours_does(played: Played, env_id: str, client: str) -> None:
    """Their client for plain data, and one with models of its own."""
    ours, theirs = played.solved[env_id], played.games[env_id, client]
    assert [text for text, _, _ in theirs["seen"]] == ours.observations
    assert [reward for _, reward, _ in theirs["seen"]] == [None, *ours.rewards]
    assert [done for _, _, done in theirs["seen"]] == [False] * len(ours.actions) + [True]
    assert theirs["success"] is True
    assert theirs["state"] == ["mine", len(ours.actions)]


def test_openenvs_client_plays_what_is_no_text(played: Played) -> None:
    assert all(len(value) == 4 for value, _, _ in played.balanced["seen"])
    assert [reward for _, reward, _ in played.balanced["seen"]] == [None, 1.0, 1.0, 1.0]
    metadata = played.balanced["metadata"]
    assert (metadata["terminated"], metadata["truncated"]) == (False, False)


def test_openenvs_client_is_told_that_there_is_no_room(played: Played) -> None:
    assert "CAPACITY_REACHED" in played.full["told"]
    assert played.full["done"] is False, "and finds room once another has gone"


async def test_openenvs_clients_leave_no_session(server: Server, played: Played) -> None:
    async with server.http() as http:
        assert (await http.get("/v1/sessions")).json()["sessions"] == []


@pytest.fixture(scope="module")
def peer(openenv: Path) -> Iterator[PeerServer]:
    with PeerServer(openenv, "openenv_server.py") as running:
        yield running


async def guess(session: EnvSession) -> None:
    began = await session.reset(seed=13)
    assert (began.observation, began.info) == ("a number from 0 to 9", {"left": 5})
    wrong = await session.step("7")
    assert (wrong.observation, wrong.reward, wrong.terminated, wrong.info) == ("no", 0.0, False, {"left": 4})
    unreadable = await session.step("seven")
    assert unreadable.info["action_is_valid"] is False
    assert "guess: Input should be a valid integer" in unreadable.observation
    right = await session.step("3")
    assert (right.reward, right.terminated, right.truncated) == (1.0, True, False)

    await session.reset(seed=13)
    late = [await session.step("0") for _ in range(5)][-1]
    assert (late.terminated, late.truncated) == (False, True), "their metadata says so"

    await session.reset(seed=13)
    with pytest.raises(ProblemError, match="it is not negative"):
        await session.step("-1")


async def kwargs_and_options(client: EnvClient, session: EnvSession) -> None:
    began = await session.reset(seed=13, options={"low": 20})
    assert began.observation == "a number from 20 to 29"
    assert (await session.step("23")).terminated
    other = await client.make("Guess", kwargs={"low": 30})
    assert (await other.reset(seed=1)).observation == "a number from 30 to 39"
    await session.reset(seed=4)
    assert (await other.step("31")).terminated, "sessions are apart"
    await other.close()


async def test_a_server_with_room_for_one_session(gateway: Server, peer: PeerServer) -> None:
    """OpenEnv's default: the probe must do with it, and a second session is told to come again."""
    async with gateway.http() as http:
        body = {"env_id": "Single", "url": f"{peer.url}/single", "protocol": "openenv"}
        registered = await http.post("/v1/envs", json=body)
        assert registered.status_code == 201, registered.text
        one = (await http.post("/v1/sessions", json={"env_id": "Single", "reset": {"seed": 2}})).json()
        full = await http.post("/v1/sessions", json={"env_id": "Single"})
        assert (full.status_code, full.json()["code"]) == (503, "at_capacity")
        assert "Retry-After" in full.headers
        await http.delete(f"/v1/sessions/{one['session_id']}")
        async with EnvClient(gateway.url) as client:
            again = await client.make("Single")
            await again.reset(seed=2)
            assert (await again.step("2")).terminated
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")


async def test_an_mcp_environment_of_openenvs_is_played(gateway: Server, peer: PeerServer) -> None:
    async with gateway.http() as http:
        body = {"env_id": "Echo", "url": f"{peer.url}/echo", "protocol": "openenv"}
        registered = await http.post("/v1/envs", json=body)
        assert registered.status_code == 201, registered.text
        async with EnvClient(gateway.url) as client:
            session = await client.make("Echo")
            assert json.loads((await session.reset(seed=1)).observation) == {"status": "ready"}
            listed = json.loads((await session.step('{"type": "list_tools"}')).observation)
            assert [tool["name"] for tool in listed["tools"]] == ["echo_message"]
            call = {"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}}
            called = json.loads((await session.step(json.dumps(call))).observation)
            assert (called["result"]["data"], called["error"]) == ("hi", None)
            await session.close()
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")


@pytest.mark.slow
async def test_an_authors_own_client_stays_with_its_own_server(
    gateway: Server, peer: PeerServer, openenv: Path
) -> None:
    """docs/coming_from/openenv.md says so: the gateway shows text, whose fields are others."""
    async with gateway.http() as http:
        body = {"env_id": "Own", "url": f"{peer.url}/many", "protocol": "openenv"}
        registered = await http.post("/v1/envs", json=body)
        assert registered.status_code == 201, registered.text
        jobs = [("authors", f"{peer.url}/many"), ("authors", f"{gateway.url}/openenv/Own")]
        own, through = await asyncio.to_thread(play, openenv, "openenv_player.py", json.dumps(jobs))
        assert own == {"hint": "a number from 0 to 9yes", "told": ""}
        assert through["hint"] == ""
        assert "VALIDATION_ERROR" in through["told"]
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")


@pytest.mark.slow
async def test_our_client_plays_on_openenvs_server(gateway: Server, peer: PeerServer, openenv: Path) -> None:
    async with gateway.http() as http:
        body = {"env_id": "Guess", "url": f"{peer.url}/many", "protocol": "openenv"}
        registered = await http.post("/v1/envs", json=body)
        assert registered.status_code == 201, registered.text
        async with EnvClient(gateway.url) as client:
            session = await client.make("Guess")
            await guess(session)
            await kwargs_and_options(client, session)
            # All the way through: their client, our face, our gateway, their server.
            job = ("generic", f"{gateway.url}/openenv/Guess", 2, ["5", "2"])
            (through,) = await asyncio.to_thread(play, openenv, "openenv_player.py", json.dumps([job]))
            assert [done for _, _, done in through["seen"]] == [False, False, True]
            assert [text for text, _, _ in through["seen"]] == ["a number from 0 to 9", "no", "yes"]

            await session.reset(seed=4)
            peer.kill()
            with pytest.raises(ProblemError) as caught:
                await session.step("4")
            assert (caught.value.code, caught.value.extra["reason"]) == ("session_gone", "lost")
            peer.start()  # Other tests may follow.
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")
