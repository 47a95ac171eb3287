"""An episode survives whatever its length: what a server lets become so long can be had, and restored elsewhere."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import websockets

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import add_token
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player
from tests.support.journal_fleet import whole_at
from tests.support.redis_server import RedisServer
from tests.support.wire import ENVS, INLINE, Server

QUIET = ("--log-level", "error")
GATEWAY = ("--gateway", "--allow-network", "loopback", *QUIET)
WALKS = ("--no-builtin", "--env", "Walk-v0=tests.support.client_envs:Walk", "--isolation", "Walk-v0=inline")
# A reasoning model's episode, one that pastes files, and one as long as it may become.
LENGTHS = ((300, 4_000), (15, 100_000), (16, 1_040_000))
ALL = [f"{steps} steps of {size}" for steps, size in LENGTHS]


def actions(steps: int, size: int) -> list[str]:
    return [f"{number} ".ljust(size, "a") for number in range(steps)]


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerProcess]:
    with ServerProcess((*WALKS, *QUIET)) as server:
        yield server


async def undisturbed(alone: ServerProcess, taken: Sequence[str]) -> list[Any]:
    """What an episode with these actions looks like."""
    player = Player(alone.url, risk=0.0)
    await player.begin(5)
    for action in taken:
        await player.step(action)
    await player.http.aclose()
    return player.seen


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """A gateway and two nodes."""
    with ServerProcess(GATEWAY) as gateway:
        node = (*WALKS, *QUIET, "--register", gateway.url)
        with ServerProcess(node) as first, ServerProcess(node) as second:
            asyncio.run(whole_at([gateway], 2))
            yield [gateway, first, second]


async def home_of(player: Player, nodes: Sequence[ServerProcess]) -> ServerProcess:
    """The node that has the one session that there is."""
    for node in nodes:
        if (await player.ask("GET", f"{node.url}/v1/info"))["capacity"]["sessions"]:
            return node
    raise AssertionError("no node has a session")


@pytest.mark.parametrize("length", LENGTHS, ids=ALL)
async def test_a_killed_node_s_episode_goes_on_at_another_one(
    fleet: list[ServerProcess], alone: ServerProcess, length: tuple[int, int]
) -> None:
    gateway, *nodes = fleet
    taken = actions(*length)
    player = await Player(gateway.url, risk=0.0).begin(5)
    for action in taken:
        await player.step(action)
    home = await home_of(player, nodes)
    home.kill()
    try:
        await player.step("and on")
        assert player.seen == await undisturbed(alone, [*taken, "and on"])
    finally:
        await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
        await player.http.aclose()
        home.start()
        await whole_at([gateway], 2)


async def test_a_gateway_that_was_started_anew_takes_a_long_episode_in(
    fleet: list[ServerProcess], alone: ServerProcess
) -> None:
    gateway = fleet[0]
    taken = actions(*LENGTHS[-1])
    player = await Player(gateway.url, risk=0.0).begin(5)
    for action in taken:
        await player.step(action)
    gateway.kill()
    gateway.start()
    await whole_at([gateway], 2)
    await player.step("and on")
    assert player.seen == await undisturbed(alone, [*taken, "and on"])
    await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
    await player.http.aclose()


async def test_a_shared_journal_brings_long_episodes_back(tmp_path: Path, alone: ServerProcess) -> None:
    taken = actions(*LENGTHS[0])
    with (
        RedisServer(tmp_path) as journal,
        ServerProcess((*GATEWAY, "--journal-url", journal.url)) as gateway,
        ServerProcess((*WALKS, *QUIET, "--register", gateway.url)) as one,
        ServerProcess((*WALKS, *QUIET, "--register", gateway.url)) as other,
    ):
        await whole_at([gateway], 2)
        player = await Player(gateway.url, risk=0.0).begin(5)
        for action in taken:
            await player.step(action)
        for node in (one, other):
            node.kill()
        for node in (one, other):
            node.start()
        await whole_at([gateway], 2)
        await player.step("and on")
        assert player.seen == await undisturbed(alone, [*taken, "and on"])
        await player.http.aclose()


@pytest.mark.parametrize("length", LENGTHS, ids=ALL)
def test_a_client_goes_on_where_its_server_was_replaced(
    alone: ServerProcess, length: tuple[int, int]
) -> None:
    taken = actions(*length)
    with ServerProcess((*WALKS, *QUIET)) as server, RemoteEnv(server.url, "Walk-v0", {"risk": 0.0}) as env:
        seen = [env.reset(seed=5)[0], *(env.step(action)[0] for action in taken)]
        server.kill()
        server.start()
        seen.append(env.step("and on")[0])
    expected = asyncio.run(undisturbed(alone, [*taken, "and on"]))
    assert seen == [each["observation"] for each in expected]


@pytest.mark.parametrize("binary", [False, True])
async def test_what_was_exported_is_restored(binary: bool) -> None:
    kind = "application/msgpack" if binary else "application/json"
    with Server(*ENVS, *INLINE) as server:
        async with server.http() as http, server.socket(binary=binary) as socket:
            made = await socket.make(kwargs={"length": 100})
            for _ in range(16):
                # Whatever takes more room in the one encoding than in the other.
                await socket.call("step", session_id=made, action="\n\"'" * 200_000)
            over = await socket.ask("step", session_id=made, action="\n" * 1_000_000)
            assert over["error"]["code"] == "too_large"
            answer = await http.get(f"/v1/sessions/{made}/episode", headers={"Accept": kind})
            assert (answer.status_code, len(answer.content) > 8 * 1024 * 1024) == (200, True)
            episode = msgpack.unpackb(answer.content) if binary else answer.json()
            assert await socket.call("episode", session_id=made) == episode
            body = {"episode": episode}
            sent = {"content": msgpack.packb(body)} if binary else {"json": body}
            headers = {"Content-Type": kind, "Accept": "application/json"}
            restored = await http.post("/v1/sessions/restore", headers=headers, **sent)
            assert (restored.status_code, restored.json()["step"]) == (201, 16)
            assert (await socket.call("restore", episode=episode))["step"] == 16


async def test_other_requests_are_no_larger_for_it() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with server.http() as http, server.socket() as socket:
            large = "a" * 1_100_000
            made = await socket.make()
            assert (await socket.ask("step", session_id=made, action=large))["error"]["limit"] == 1024 * 1024
            answer = await http.post(f"/v1/sessions/{made}/step", json={"action": large})
            assert (answer.status_code, answer.json()["limit"]) == (413, 1024 * 1024)


async def test_what_restores_is_bounded_and_it_is_said_by_what() -> None:
    with Server(*ENVS, *INLINE, "--max-episode-bytes", "500000") as server:
        async with server.http() as http, server.socket() as socket:
            most = (await http.get("/v1/info")).json()["limits"]["max_restore_bytes"]
            assert most == 500_000 + 1024 * 1024
            answer = await http.post("/v1/sessions/restore", content=b"x" * (most + 1))
            assert (answer.status_code, answer.json()["limit"]) == (413, most)
            assert (await socket.ask("restore", episode="x" * most))["error"]["limit"] == most


async def test_a_session_that_no_node_can_restore_is_lost(tmp_path: Path) -> None:
    with (
        ServerProcess(GATEWAY) as gateway,
        ServerProcess((*WALKS, *QUIET, "--register", gateway.url)) as large,
    ):
        await whole_at([gateway], 1)
        player = await Player(gateway.url, risk=0.0).begin(5)
        for action in actions(15, 100_000):
            await player.step(action)
        small = ("--max-episode-bytes", "100000", "--max-request-bytes", "200000")
        with ServerProcess((*WALKS, *QUIET, "--register", gateway.url, *small)):
            await whole_at([gateway], 2)
            large.kill()
            for _ in range(2):
                with pytest.raises(ProblemError, match="session_gone") as gone:
                    await player.step("and on")
                assert gone.value.extra["reason"] == "lost"
        await player.http.aclose()


async def test_a_client_is_told_that_its_session_is_lost() -> None:
    with ServerProcess((*WALKS, *QUIET)) as server:
        async with EnvClient(server.url) as client:
            session = await client.make("Walk-v0", {"risk": 0.0})
            await session.reset(seed=5)
            for action in actions(15, 100_000):
                await session.step(action)
            server.kill()
            server.arguments += ["--max-episode-bytes", "100000", "--max-request-bytes", "200000"]
            server.start()
            with pytest.raises(ProblemError, match="longer than the server restores") as gone:
                await session.step("and on")
            assert (gone.value.code, gone.value.extra["reason"]) == ("session_gone", "lost")


async def test_who_did_not_say_who_it_is_sends_no_more_than_before(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    token = add_token(tokens, "ann", ["play"])
    large = "x" * (8 * 1024 * 1024 + 1)
    with Server(*ENVS, *INLINE, "--token-file", str(tokens)) as server:
        async with server.socket() as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await socket.ask("ping", text=large)
            assert socket.connection.close_code == 1009
        async with server.socket() as socket, server.http() as http:
            assert (await http.post("/v1/sessions/restore", content=b"{}")).status_code == 401
            # Known, it may send so much; a frame that is no restore is only answered.
            await socket.call("auth", token=token)
            assert (await socket.ask("ping", text=large))["error"]["code"] == "too_large"
