"""OpenEnv's own clients on our servers, and our client on OpenEnv's own server behind our gateway."""

import json
from pathlib import Path

import pytest

from clients.client import EnvClient
from clients.protocol.errors import ProblemError
from clients.session import EnvSession
from tests.support.peer_processes import PeerServer, play
from tests.support.solved import solve
from tests.support.wire import Server


async def test_openenvs_clients_solve_what_ours_does(server: Server, openenv: Path) -> None:
    """Their client for plain data and one with models of its own; the server has two I/O processes."""
    games = ("FrozenLake-v0", "Sokoban-v0")
    solved = {env_id: await solve(server.url, env_id, seed=11) for env_id in games}
    episodes = [
        (client, f"{server.url}/openenv/{env_id}", 11, solved[env_id].actions)
        for env_id in games
        for client in ("generic", "typed")
    ]
    no_text = ("generic", f"{server.url}/openenv/CartPole-v1", 5, [0, 1, 1])
    *played, balanced = play(openenv, "openenv_player.py", json.dumps([*episodes, no_text]))
    for (_, url, _, actions), each in zip(episodes, played, strict=True):
        ours = solved[url.rpartition("/")[2]]
        assert [text for text, _, _ in each["seen"]] == ours.observations
        assert [reward for _, reward, _ in each["seen"]] == [None, *ours.rewards]
        assert [done for _, _, done in each["seen"]] == [False] * len(actions) + [True]
        assert each["success"] is True
        assert each["state"] == ["mine", len(actions)]
    assert all(len(value) == 4 for value, _, _ in balanced["seen"])
    assert [reward for _, reward, _ in balanced["seen"]] == [None, 1.0, 1.0, 1.0]
    assert (balanced["metadata"]["terminated"], balanced["metadata"]["truncated"]) == (False, False)
    async with server.http() as http:
        assert (await http.get("/v1/sessions")).json()["sessions"] == []


async def test_openenvs_client_is_told_that_there_is_no_room(openenv: Path) -> None:
    with Server("--max-sessions", "1") as server:
        told = play(openenv, "openenv_player.py", "full", f"{server.url}/openenv/FrozenLake-v0")
    assert "CAPACITY_REACHED" in told["told"]
    assert told["done"] is False


async def test_our_client_plays_on_openenvs_server(gateway: Server, openenv: Path) -> None:
    with PeerServer(openenv, "openenv_server.py", "8") as peer:
        async with gateway.http() as http:
            body = {"env_id": "Guess", "url": peer.url, "protocol": "openenv"}
            registered = await http.post("/v1/envs", json=body)
            assert registered.status_code == 201, registered.text
            async with EnvClient(gateway.url) as client:
                session = await client.make("Guess")
                await guess(session)
                await kwargs_and_options(client, session)
                # All the way through: their client, our face, our gateway, their server.
                episode = ("generic", f"{gateway.url}/openenv/Guess", 2, ["5", "2"])
                (played,) = play(openenv, "openenv_player.py", json.dumps([episode]))
                assert [done for _, _, done in played["seen"]] == [False, False, True]
                assert [text for text, _, _ in played["seen"]] == ["a number from 0 to 9", "no", "yes"]

                await session.reset(seed=4)
                peer.kill()
                with pytest.raises(ProblemError) as caught:
                    await session.step("4")
                assert (caught.value.code, caught.value.extra["reason"]) == ("session_gone", "lost")
            await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")


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


async def test_a_server_with_room_for_one_session(gateway: Server, openenv: Path) -> None:
    """OpenEnv's default: the probe must do with it, and a second session is told to come again."""
    with PeerServer(openenv, "openenv_server.py", "1") as peer:
        async with gateway.http() as http:
            body = {"env_id": "Single", "url": peer.url, "protocol": "openenv"}
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
