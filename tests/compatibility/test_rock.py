"""ROCK's own environment client on our servers, and our client on GEM's environments as ROCK serves them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.env_server.access.tokens import add_token
from tests.support.peer_processes import PeerServer, play
from tests.support.solved import solve
from tests.support.wire import Server

GAME = "game:GuessTheNumber-v0-easy"


@pytest.mark.parametrize("env_id", ["FrozenLake-v0", "Sokoban-v0"])
async def test_rocks_client_solves_what_ours_does(server: Server, rock: Path, env_id: str) -> None:
    """Each of its calls is a connection of its own, so some land in the process that does not own the session."""
    solved = await solve(server.url, env_id, seed=11)
    actions = json.dumps(solved.actions)
    played = play(rock, "rock_player.py", env_id, "11", actions, ROCK_BASE_URL=server.url)
    observations, rewards, terminated, truncated = map(list, zip(*played["seen"], strict=True))
    assert observations == solved.observations
    assert rewards == [0.0, *solved.rewards]
    assert terminated == [False] * len(solved.actions) + [True]
    assert not any(truncated)
    assert played["success"] is True
    async with server.http() as http:
        assert (await http.get("/v1/sessions")).json()["sessions"] == []


async def test_rocks_client_plays_what_is_no_text(server: Server, rock: Path) -> None:
    played = play(rock, "rock_player.py", "CartPole-v1", "5", '["0", "1"]', ROCK_BASE_URL=server.url)
    assert [reward for _, reward, _, _ in played["seen"]] == [0.0, 1.0, 1.0]


async def test_rocks_client_with_a_token(rock: Path, tmp_path: Path) -> None:
    """It sends no token of its own, but the password in the address it is given."""
    token = add_token(tmp_path / "tokens.yaml", "alice", ["play"])
    with Server("--token-file", str(tmp_path / "tokens.yaml"), "--max-sessions", "1") as server:
        told = play(rock, "rock_player.py", "FrozenLake-v0", ROCK_BASE_URL=server.url)
        assert "needs a token" in told["told"]
        url = server.url.replace("://", f"://alice:{token}@")
        played = play(rock, "rock_player.py", "FrozenLake-v0", "1", '["Right"]', ROCK_BASE_URL=url)
        assert len(played["seen"]) == 2
        async with server.http(token) as http:
            await http.post("/v1/sessions", json={"env_id": "FrozenLake-v0"})
        told = play(rock, "rock_player.py", "FrozenLake-v0", ROCK_BASE_URL=url)
        assert "503" in told["told"]
        assert "at_capacity" in told["told"]


@pytest.fixture(scope="module")
def admin(rock: Path) -> Iterator[PeerServer]:
    with (
        PeerServer(rock, "rock_sandbox.py") as sandbox,
        PeerServer(rock, "rock_admin.py", str(sandbox.port)) as running,
    ):
        yield running


async def test_our_client_plays_gems_environments(gateway: Server, admin: PeerServer) -> None:
    async with gateway.http() as http:
        body = {"env_id": "Guess-gem", "url": admin.url, "protocol": "gem", "upstream_env_id": GAME}
        registered = await http.post("/v1/envs", json=body)
        assert registered.status_code == 201, registered.text
        async with EnvClient(gateway.url) as client:
            session = await client.make("Guess-gem")
            began = await session.reset(seed=3)
            assert "Guess" in began.observation or "guess" in began.observation
            assert (await session.reset(seed=3)).observation == began.observation
            low, high, rewards = 1, 10, []
            while True:
                guess = (low + high) // 2
                step = await session.step(f"\\boxed{{{guess}}}")
                rewards.append(step.reward)
                if step.terminated or step.truncated:
                    break
                if "lower" in step.observation:
                    high = guess - 1
                else:
                    low = guess + 1
            assert step.terminated
            assert rewards[-1] == 1.0, "four guesses are enough for ten numbers"
            # Our seeds go beyond those that GEM's generators take.
            assert (await session.reset(seed=2**53 - 1)).observation
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")


async def test_an_environment_that_gem_does_not_have(gateway: Server, admin: PeerServer) -> None:
    async with gateway.http() as http:
        body = {
            "env_id": "Nothing",
            "url": admin.url,
            "protocol": "gem",
            "upstream_env_id": "game:Nothing-v0",
        }
        refused = (await http.post("/v1/envs", json=body)).json()
        assert refused["code"] == "probe_failed"
        assert refused["report"][-1]["check"] == "make"


async def test_rocks_client_on_rocks_server_behind_our_gateway(
    gateway: Server, admin: PeerServer, rock: Path
) -> None:
    """All the way through: their client, our face, our gateway, their server."""
    async with gateway.http() as http:
        body = {"env_id": "Through-gem", "url": f"{admin.url}/apis/v1/envs/gem", "protocol": "gem"}
        registered = await http.post("/v1/envs", json={**body, "upstream_env_id": GAME})
        assert registered.status_code == 201, registered.text
        played = play(
            rock, "rock_player.py", "Through-gem", "3", json.dumps(["\\boxed{5}"]), ROCK_BASE_URL=gateway.url
        )
        assert len(played["seen"]) == 2
        await http.delete(f"/v1/registrations/{registered.json()['registration_id']}")
