"""Environments in actors of a Ray cluster: actors and nodes that die, more of them and fewer, and none left behind."""

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    OperationTimeout,
    WorkerLost,
)
from rollgym.env_server.workers.ray.cluster import WorkerCluster
from rollgym.env_server.workers.ray.host import (
    ActorAnswer,
    ActorRequest,
    dump_answer,
    dump_failure,
    dump_requests,
    load_answers,
    load_requests,
)
from rollgym.env_server.workers.ray.pool import Average, ScalingPolicy
from rollgym.env_server.workers.ray.worker import RayWorker
from tests.support.fragile_envs import Beacon, ended, kill
from tests.support.metrics import scrape, value
from tests.support.players import Player
from tests.support.wire import Server, Socket

# Ray takes seconds to start anything; tests/env_server/workers/test_workers.py tries its workers beside the others.
pytestmark = pytest.mark.slow

MODULE = "tests.support.fragile_envs"
ENVS = ("--env", f"Fragile={MODULE}:Fragile", "--env", f"Random={MODULE}:Random")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, and one node that has three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        running.add_node(num_cpus=3)
        yield running
        running.shutdown()


def serve(cluster: Cluster, *arguments: str) -> Server:
    return Server(*ENVS, "--workers", "ray", "--ray-address", cluster.address, *arguments)


@pytest.fixture(scope="module")
def single(cluster: Cluster) -> Iterator[Server]:
    """A server with one actor: whatever one session does, the others are in the same place."""
    with serve(cluster, "--ray-max-actors", "1") as running:
        yield running
        assert "failed inside the server" not in running.log()


def actor_of(child: int) -> int:
    """The process id of the actor that has started a child process."""
    return int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])


async def find_actor(player: Player, beacon: Beacon) -> int:
    """The process id of the actor where a session is."""
    beacon.pending()
    await player.step(f"tell {beacon.path}")
    return actor_of(await beacon.wait())


async def play(socket: Socket, *env_ids: str) -> list[Player]:
    players = [await Player.begin(socket, env_id) for env_id in env_ids]
    for player in players:
        await player.step("before")
    return players


async def check_unharmed(*players: Player) -> None:
    for player in players:
        await player.step("after")
        player.check()


async def test_what_breakpoints_do_in_the_server_is_not_for_ray_to_say(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    connection = WorkerCluster(cluster.address, None)
    await connection.connect()
    try:
        assert os.environ["PYTHONBREAKPOINT"] == "0"
    finally:
        await connection.disconnect()


# -- what dies ---------------------------------------------------------------------------------------------------


async def test_what_is_deterministic_goes_on_when_its_actor_is_killed(single: Server, beacon: Beacon) -> None:
    async with single.socket() as socket:
        *players, lost = await play(socket, "Fragile", "Fragile", "Random")
        for _ in range(2):
            await kill(await find_actor(players[0], beacon))
            await check_unharmed(*players)
        problem = await lost.fails("on")
        assert (problem["code"], problem["reason"]) == ("session_gone", "lost")
        again = await socket.call("make", env_id="Random", reset={"seed": 1})
        assert again["reset"]["observation"] == lost.replies[0]["observation"]


async def test_steps_go_on_when_their_actor_is_killed(single: Server, beacon: Beacon, tmp_path: Path) -> None:
    async with single.socket() as socket:
        holding, *others = await play(socket, "Fragile", "Fragile", "Fragile")
        action = f"hold {beacon.path} {tmp_path / 'flag'}"
        held = await holding.send(action)
        first = await beacon.wait()
        queued = [await other.send("queued") for other in others]
        await kill(actor_of(first))
        await ended(first)
        assert await beacon.wait() != first
        (tmp_path / "flag").touch()
        await holding.take(held, action)
        for other, number in zip(others, queued, strict=True):
            await other.take(number, "queued")
        await check_unharmed(holding, *others)


async def test_a_step_whose_actors_are_killed_again_and_again_is_given_up(
    single: Server, beacon: Beacon
) -> None:
    async with single.socket() as socket:
        [player] = await play(socket, "Fragile")
        step = await player.send(f"hang {beacon.path}")
        for _ in range(5):
            await kill(actor_of(await beacon.wait()))
        problem = (await socket.answer(step))["error"]
        assert (problem["code"], problem["error_class"]) == ("env_error", "WorkerLost")
        await player.check_begins_anew()


async def test_sessions_go_on_when_their_node_dies(cluster: Cluster, single: Server, beacon: Beacon) -> None:
    node = cluster.add_node(num_cpus=1)
    # Another server has one of the other node's CPUs, so that the third actor has to be on this one.
    arguments = ("--ray-min-actors", "3", "--ray-sessions-per-actor", "2", "--log-level", "info")
    with serve(cluster, *arguments) as server:
        await asyncio.to_thread(server.wait_for, "there are 3")
        async with server.socket() as socket:
            players = await play(socket, "Fragile", "Fragile", "Fragile")
            actors = [await find_actor(player, beacon) for player in players]
            assert len(set(actors)) == 3
            cluster.remove_node(node, allow_graceful=False)
            async with asyncio.timeout(30):
                gone = [asyncio.ensure_future(ended(actor)) for actor in actors]
                await asyncio.wait(gone, return_when=asyncio.FIRST_COMPLETED)
            assert sum(each.done() for each in gone) == 1, "it had one CPU"
            for each in gone:
                each.cancel()
            await check_unharmed(*players)


# -- how many there are ------------------------------------------------------------------------------------------


async def test_actors_come_with_sessions_and_go_without(cluster: Cluster, beacon: Beacon) -> None:
    arguments = ("--ray-sessions-per-actor", "2", "--ray-idle-timeout-s", "0.5", "--ray-max-actors", "2")
    with serve(cluster, *arguments) as server:
        async with server.socket() as socket:
            players = await play(socket, *["Fragile"] * 4)
            actors = [await find_actor(player, beacon) for player in players]
            async with asyncio.timeout(60):
                # A second actor that is long in coming, on a busy machine, is not waited for.
                while actors[2] == actors[0]:
                    for player in players[2:]:
                        await player.ask("close")
                    players[2:] = await play(socket, "Fragile", "Fragile")
                    actors[2:] = [await find_actor(player, beacon) for player in players[2:]]
            assert actors == [actors[0]] * 2 + [actors[2]] * 2
            crowding = await Player.begin(socket)
            assert await find_actor(crowding, beacon) in actors, "there may be no third actor"
            await crowding.ask("close")
            for player in players[2:]:
                await player.ask("close")
            await ended(actors[2])
            await check_unharmed(*players[:2])
            # One is left where a single session needs none of the others; it is where its next episode begins.
            assert await find_actor(players[0], beacon) == actors[0]
        assert server.stop() == 0
        await ended(actors[0])


async def test_who_waits_to_begin_goes_to_an_actor_that_comes_meanwhile(
    cluster: Cluster, beacon: Beacon, tmp_path: Path
) -> None:
    arguments = ("--ray-num-cpus", "0.5", "--ray-max-actors", "2", "--ray-operations-per-actor", "1")
    with serve(cluster, *arguments) as server:
        async with server.socket() as socket:
            made = [(await socket.call("make", env_id="Fragile"))["session_id"] for _ in range(5)]
            flag = tmp_path / "flag"
            # It keeps the only child of the only actor that there is.
            held = await socket.send("reset", session_id=made[0], options={"hold": f"{beacon.path} {flag}"})
            first = actor_of(await beacon.wait())
            waiting = [await socket.send("reset", session_id=each, seed=1) for each in made[1:]]
            async with asyncio.timeout(60):
                begun = [await socket.answer(number) for number in waiting]
            assert len({answer["ok"]["observation"] for answer in begun}) == 1
            for each in made[1:]:
                await socket.call("step", session_id=each, action=f"tell {beacon.path}")
                assert actor_of(await beacon.wait()) != first
            flag.touch()
            assert (await socket.answer(held))["ok"]["step"] == 0
        samples = await scrape(server.url)
        assert value(samples, "rollgym_ready") == 1
        assert server.stop() == 0


async def test_a_server_whose_node_is_gone_is_not_ready() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray asks a node every three seconds, and believes it after five times that it is gone.
        patch.setenv("RAY_health_check_period_ms", "500")
        started = Server(*ENVS, "--workers", "ray")
    with started as server:
        async with server.http() as client:
            await check_that_it_becomes_unready(server, client)


async def check_that_it_becomes_unready(server: Server, client: httpx.AsyncClient) -> None:
    assert (await client.get("/ready")).status_code == 200
    await kill(raylet_of(server.process.pid))
    async with asyncio.timeout(60):
        while (found := await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.2)
    assert [reason["code"] for reason in found.json()["reasons"]] == ["workers"]


def raylet_of(pid: int) -> int:
    """The process of Ray's that is this process's node."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [each for task in threads for each in (task / "children").read_text().split()]
    [found] = [int(each) for each in children if Path(f"/proc/{each}/comm").read_text() == "raylet\n"]
    return found


async def test_an_episode_begins_where_there_is_less_to_do(
    cluster: Cluster, beacon: Beacon, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2)
    arguments = ("--ray-num-cpus", "2", "--ray-max-actors", "2", "--ray-operations-per-actor", "0.2")
    with serve(cluster, *arguments) as server:
        async with server.socket() as socket:
            busy, other = await play(socket, "Fragile", "Random")
            action = f"hold {beacon.path} {tmp_path / 'flag'}"
            step = await busy.send(action)
            crowded = actor_of(await beacon.wait())
            async with asyncio.timeout(60):
                # It has the actor's other child, until a second actor has come.
                while True:
                    begun = (await other.ask("reset", seed=1))["ok"]
                    assert begun["observation"] == other.replies[0]["observation"]
                    assert "ok" in await other.ask("step", action=f"tell {beacon.path}")
                    if actor_of(await beacon.wait()) != crowded:
                        break
            (tmp_path / "flag").touch()
            await busy.take(step, action)
            await check_unharmed(busy)


async def test_no_actor_outlives_a_server_that_is_killed(cluster: Cluster, beacon: Beacon) -> None:
    with serve(cluster) as server:
        async with server.socket() as socket:
            [player] = await play(socket, "Fragile")
            await player.step(f"tell {beacon.path}")
            child = await beacon.wait()
            actor = actor_of(child)
        await kill(server.process.pid)
        await ended(actor)
        await ended(child)


# -- the parts ---------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 3),
    st.integers(3, 9),
    st.integers(1, 5),
    st.floats(0.1, 9),
    st.integers(0, 99),
    st.floats(0, 99),
)
def test_as_many_actors_as_the_load_asks_for(
    least: int, most: int, per_actor: int, operations_per_actor: float, sessions: int, operations: float
) -> None:
    policy = ScalingPolicy(least, most, per_actor, operations_per_actor, 1.0, 1.0)
    wanted = policy.wanted(sessions, operations)
    assert least <= wanted <= most
    if wanted < most:
        assert sessions <= wanted * per_actor
        assert operations <= (wanted + 0.01) * operations_per_actor
    if wanted > least:
        fewer = wanted - 1
        assert sessions > fewer * per_actor or operations > fewer * operations_per_actor
    assert policy.wanted(sessions + 1, operations) >= wanted
    assert policy.wanted(sessions, operations + 1) >= wanted


def test_an_average_is_over_time() -> None:
    average = Average(now=10.0)
    average.change(8, now=10.5)
    average.change(0, now=10.75)
    assert average.look(now=11.0, weight=1.0) == 2.0
    assert average.look(now=11.0, weight=1.0) == 2.0
    average.change(4, now=12.0)
    assert average.look(now=13.0, weight=0.5) == 2.0


def test_requests_and_answers_are_read_as_they_were_written() -> None:
    requests = [ActorRequest(0, "close", ("1",), None), ActorRequest(7, "step", ("1", {"push": [1.5]}), 2.0)]
    assert list(load_requests(dump_requests(requests))) == requests
    failures = [
        EnvironmentRaised("KeyError", "x"),
        OperationTimeout("late"),
        WorkerLost("gone", at_fault=True),
    ]
    answers = [dump_answer(1, ("seen", 0.5, False, False, {"a": [1]}))]
    answers += [dump_failure(number, failure) for number, failure in enumerate(failures, start=2)]
    first, *others = load_answers(b"".join(answers))
    assert first == ActorAnswer(1, ("seen", 0.5, False, False, {"a": [1]}), None)
    assert [repr(each.failure) for each in others] == [repr(failure) for failure in failures]
    lost = others[2].failure
    assert isinstance(lost, WorkerLost)
    assert lost.at_fault


async def test_a_response_that_no_actor_was_ready_for_is_an_error() -> None:
    class NoActors:
        async def pick_scorer(self, scores_per_process: int) -> None:
            raise NoWorker("no Ray actor was ready in 60 s")

    pool: Any = NoActors()
    source = EnvSource("class", f"{MODULE}:Scores")
    assert await RayWorker(pool).verify(source, [{"response": ""}], timeout=1.0) == [
        {"score": 0.0, "outcome": "error", "detail": "no Ray actor was ready in 60 s"}
    ]
