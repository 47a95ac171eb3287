"""Sessions that a gateway passes on: several gateways, gateways before gateways, and what dies in between."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
import websockets

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ENVS, ServerProcess
from tests.support.gateway_players import Player, sessions_at, undisturbed
from tests.support.redis_server import RedisServer

QUIET = ("--log-level", "error")
# What they could not register, and why, is the first question where they are not whole in time.
TELLING = ("--log-level", "warning")
GATEWAY = ("--gateway", "--allow-network", "loopback", "--linger-s", "2", *QUIET)
ENV_IDS = {"Walk-v0", "Dice-v0", "Slow-v0", "Arm-v0", "FrozenLake-v0"}


class Fleet(NamedTuple):
    """Two gateways that share a journal, two nodes behind both, and a third gateway before the first one."""

    one: ServerProcess
    other: ServerProcess
    upper: ServerProcess
    nodes: list[ServerProcess]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with (
        RedisServer(tmp_path_factory.mktemp("journal")) as journal,
        ServerProcess((*GATEWAY, "--journal-url", journal.url)) as one,
        ServerProcess((*GATEWAY, "--journal-url", journal.url)) as other,
        ServerProcess(GATEWAY) as upper,
    ):
        # Not given up on before a test is over.
        arguments = (*ENVS, "--register", one.url, "--register", other.url, "--linger-s", "1", *TELLING)
        # Gateways make a session of each environment that is registered, and sessions are counted here.
        arguments = (
            "--no-builtin",
            "--env",
            "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv",
            *arguments,
        )
        with ServerProcess(arguments) as first, ServerProcess((*arguments, "--processes", "2")) as second:
            found = Fleet(one, other, upper, [first, second])
            asyncio.run(whole(found))
            with httpx.Client(base_url=upper.url) as http:
                for env_id in sorted(ENV_IDS):
                    body = {"env_id": env_id, "url": one.url, "protocol": "rollgym", "ttl_s": 600}
                    assert http.post("/v1/envs", json=body).status_code == 201
            yield found


async def whole(fleet: Fleet) -> None:
    """Wait until all nodes are registered with both gateways."""
    for gateway in (fleet.one, fleet.other):
        found: dict[str, int] = {}
        try:
            async with asyncio.timeout(90), httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
                while found != dict.fromkeys(ENV_IDS, len(fleet.nodes)):
                    await asyncio.sleep(0.1)
                    envs = (await http.get("/v1/envs")).json()["envs"]
                    found = {env["env_id"]: env["replicas"] for env in envs if env["env_id"] in ENV_IDS}
        except TimeoutError:
            raise AssertionError(f"{gateway.url} has not come to have all nodes: {found}") from None


@pytest.fixture
async def players() -> AsyncIterator[list[Player]]:
    made: list[Player] = []
    yield made
    for player in made:
        if player.session_id:
            await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
        await player.http.aclose()


async def one_at_each_node(url: str, env_id: str) -> list[Player]:
    """Begin two sessions that a gateway has put at two nodes."""
    begun = [await Player(url, env_id, risk=0.0).begin(3)]
    try:
        # A node that other tests have left sessions at, or that has just come back, gets the next ones later.
        async with asyncio.timeout(30):
            while begun[0].session_id[:9] == begun[-1].session_id[:9]:
                await asyncio.sleep(0.05)
                begun.append(await Player(url, env_id, risk=0.0).begin(3))
        return [begun.pop(0), begun.pop()]
    finally:
        for player in begun:
            await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
            await player.http.aclose()


async def no_session_left(nodes: list[ServerProcess]) -> None:
    async with asyncio.timeout(30):
        while await sessions_at(nodes):
            await asyncio.sleep(0.1)


async def test_any_gateway_goes_on_with_a_session(fleet: Fleet, players: list[Player]) -> None:
    player = await Player(fleet.one.url, risk=0.0).begin(3)
    players.append(player)
    urls = [fleet.one.url, fleet.other.url, fleet.other.url, fleet.one.url, fleet.other.url]
    for number, url in enumerate(urls):
        await player.step(str(number), url=url)
    expected = await undisturbed(fleet.nodes[0].url, 3, ["0", "1", "2", "3", "4"], risk=0.0)
    assert player.seen == expected
    described = await player.ask("GET", f"{fleet.other.url}/v1/sessions/{player.session_id}")
    assert described["session_id"] == player.session_id
    assert (described["episode"], described["step"], described["owner"]) == (0, 5, "anyone")
    assert (await player.episode())["actions"] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("env_id", ["Walk-v0", "Dice-v0"])
async def test_equal_steps_that_name_no_place_are_all_taken(
    fleet: Fleet, players: list[Player], env_id: str
) -> None:
    """As agents of other protocols take them, through one gateway and the other."""
    player = await Player(fleet.one.url, env_id, risk=0.0).begin(3)
    players.append(player)
    urls = [fleet.one.url, fleet.one.url, fleet.other.url, fleet.one.url]
    for url in urls:
        path = f"{url}/v1/sessions/{player.session_id}/step"
        player.seen.append(await player.ask("POST", path, {"action": "left"}))
    expected = await undisturbed(fleet.nodes[0].url, 3, 4 * ["left"], env_id=env_id, risk=0.0)
    assert player.seen == expected


@pytest.mark.parametrize("env_id", ["Walk-v0", "Dice-v0"])
async def test_equal_steps_that_name_no_place_are_all_taken_when_they_come_at_once(
    fleet: Fleet, players: list[Player], env_id: str
) -> None:
    player = await Player(fleet.one.url, env_id, risk=0.0).begin(3)
    players.append(player)
    step = f"/v1/sessions/{player.session_id}/step"
    found = await asyncio.gather(*(player.ask("POST", step, {"action": "left"}) for _ in range(6)))
    player.seen += sorted(found, key=lambda each: int(each["step"]))
    expected = await undisturbed(fleet.nodes[0].url, 3, 6 * ["left"], env_id=env_id, risk=0.0)
    assert player.seen == expected


async def test_a_gateway_that_was_not_told_of_steps_rebuilds_them_all_the_same(
    fleet: Fleet, players: list[Player]
) -> None:
    """One gateway sees the steps 0 and 2, the other one step 1, then the nodes die."""
    both = [await Player(fleet.one.url, risk=0.0).begin(seed) for seed in range(4)]
    players.extend(both)
    for number, url in enumerate((fleet.one.url, fleet.other.url, fleet.one.url)):
        for player in both:
            await player.step(str(number), url=url)
    # The first gateway asks for the steps that it has missed in the background.
    for player in both:
        assert len((await player.episode())["actions"]) == 3
    fleet.nodes[1].kill()
    try:
        for player in both:
            await player.step("3")
    finally:
        fleet.nodes[1].start()
        await whole(fleet)
    for seed, player in enumerate(both):
        assert player.seen == await undisturbed(fleet.nodes[0].url, seed, ["0", "1", "2", "3"], risk=0.0)


async def test_a_gateway_is_lost_and_nothing_with_it(fleet: Fleet, players: list[Player]) -> None:
    both = [await Player(fleet.other.url, risk=0.0).begin(seed) for seed in range(4)]
    players.extend(both)
    for player in both:
        await player.step("a")
    fleet.other.kill()
    for player in both[:2]:
        await player.step("b", url=fleet.one.url)
    # Longer than sessions of sockets that dropped stay at the nodes.
    await asyncio.sleep(1.5)
    fleet.other.start()
    for player in both[2:]:
        while True:
            try:
                await player.step("b")
            except ProblemError as problem:
                if problem.code != "draining":
                    raise
            else:
                break
    for seed, player in enumerate(both):
        assert player.seen == await undisturbed(fleet.nodes[0].url, seed, ["a", "b"], risk=0.0)
    await whole(fleet)


async def test_a_node_dies_under_many_operations(fleet: Fleet) -> None:
    """Steps one by one and in batches, on inline and on slow environments, while a node is killed and comes back."""
    async with (
        EnvClient(fleet.one.url) as client,
        EnvClient(fleet.one.url, encoding="msgpack") as binary,
        EnvClient(fleet.nodes[1].url) as direct,
    ):

        async def begin(where: EnvClient, env_id: str, count: int) -> list[EnvSession]:
            sessions = await where.make_many(env_id, count, {"risk": 0.0})
            await asyncio.gather(*(each.reset(seed=seed) for seed, each in enumerate(sessions)))
            return sessions

        parts = [
            (client, "Walk-v0", await begin(client, "Walk-v0", 24)),
            (binary, "Walk-v0", await begin(binary, "Walk-v0", 24)),
            (client, "Slow-v0", await begin(client, "Slow-v0", 6)),
        ]
        ids = {each.session_id for _, _, sessions in parts for each in sessions}
        twins = [await begin(direct, env_id, len(sessions)) for _, env_id, sessions in parts]

        async def play(where: EnvClient, sessions: list[EnvSession], batched: bool) -> list[Any]:
            seen: list[Any] = []
            for number in range(30):
                if batched:
                    results = await where.step_many([(each, str(number)) for each in sessions])
                else:
                    results = await asyncio.gather(*(each.step(str(number)) for each in sessions))
                seen.append([tuple(result) for result in results])
            return seen

        async def disturb() -> None:
            await asyncio.sleep(0.2)
            fleet.nodes[0].kill()
            await asyncio.sleep(0.5)
            fleet.nodes[0].start()

        playing = [
            asyncio.create_task(play(where, sessions, batched))
            for batched, (where, _, sessions) in zip((True, False, False), parts, strict=True)
        ]
        await disturb()
        seen = await asyncio.gather(*playing)
        expected = await asyncio.gather(*(play(direct, each, False) for each in twins))
        assert seen == expected
        assert {each.session_id for _, _, sessions in parts for each in sessions} == ids, (
            "a client restored one"
        )
        for _, _, sessions in parts:
            await client.close_sessions(sessions)
    await whole(fleet)


@pytest.mark.slow
async def test_what_cannot_be_rebuilt_is_lost_with_its_node(fleet: Fleet, players: list[Player]) -> None:
    dice = [await Player(fleet.one.url, "Dice-v0").begin(1) for _ in range(4)]
    players.extend(dice)
    fleet.nodes[0].kill()
    try:
        outcomes = await asyncio.gather(*(player.step("a") for player in dice), return_exceptions=True)
    finally:
        fleet.nodes[0].start()
    await whole(fleet)
    nodes = {True: set(), False: set()}
    for player, outcome in zip(dice, outcomes, strict=True):
        nodes[isinstance(outcome, ProblemError)].add(player.session_id[:9])
    assert len(nodes[True]) == len(nodes[False]) == 1, outcomes
    assert nodes[True] != nodes[False]
    # Until its node is back, it might have kept them.
    assert {each.code for each in outcomes if isinstance(each, ProblemError)} == {"upstream_error"}
    for player in dice:
        if len(player.seen) == 1:
            with pytest.raises(ProblemError, match="session_gone"):
                await player.step("a")


async def test_a_session_that_is_closed_while_it_is_rebuilt_leaves_nothing(fleet: Fleet) -> None:
    both = await one_at_each_node(fleet.one.url, "Slow-v0")
    for player in both:
        await player.step("sleep 2")
    fleet.nodes[0].kill()
    try:
        steps = [asyncio.create_task(player.step("a")) for player in both]
        # One of them was there; it is looked for and then rebuilt on the other node, which takes three seconds.
        await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        for player in both:
            await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, ProblemError)]
        assert [(problem.code, problem.extra["reason"]) for problem in refused] == [
            ("session_gone", "closed")
        ]
        async with asyncio.timeout(30):
            while await sessions_at(fleet.nodes[1:]):
                await asyncio.sleep(0.1)
    finally:
        fleet.nodes[0].start()
        await whole(fleet)
        for player in both:
            await player.http.aclose()


async def test_a_gateway_before_a_gateway(fleet: Fleet, players: list[Player]) -> None:
    player = await Player(fleet.upper.url, risk=0.0).begin(7)
    players.append(player)
    for action in ("a", "b"):
        await player.step(action)
    copies = (await player.ask("POST", f"/v1/sessions/{player.session_id}/fork", {"count": 2}))["session_ids"]
    fleet.nodes[0].kill()
    try:
        await player.step("c")
        original, player.session_id = player.session_id, copies[0]
        player.seen.pop()
        await player.step("c")
        player.session_id = original
    finally:
        fleet.nodes[0].start()
    await whole(fleet)
    assert player.seen == await undisturbed(fleet.nodes[1].url, 7, ["a", "b", "c"], risk=0.0)
    closed = await player.ask("POST", "/v1/sessions/close", {"session_ids": [player.session_id, *copies]})
    assert closed == {"closed": 3}


async def test_a_copy_with_other_chances_survives_its_node(fleet: Fleet, players: list[Player]) -> None:
    player = await Player(fleet.one.url, risk=0.5).begin(11)
    players.append(player)
    path = f"/v1/sessions/{player.session_id}/fork"
    twice = [(await player.ask("POST", path, {"reseed": 5}))["session_ids"][0] for _ in range(2)]
    episodes = []
    for number, session_id in enumerate(twice):
        copy = Player(fleet.one.url)
        players.append(copy)
        copy.session_id, copy.seen = session_id, list(player.seen)
        for action in ("a", "b", "c"):
            if number and action == "b":
                fleet.nodes[0].kill()
            if copy.seen[-1].get("terminated"):
                break
            await copy.step(action)
        episodes.append((copy.seen, (await copy.episode())["digests"]))
    fleet.nodes[0].start()
    assert episodes[0] == episodes[1]
    await whole(fleet)


async def test_a_portable_episode_goes_on_behind_the_gateway(fleet: Fleet, players: list[Player]) -> None:
    player = await Player(fleet.nodes[0].url, risk=0.0).begin(5)
    players.append(player)
    await player.step("a")
    moved = Player(fleet.one.url, risk=0.0)
    players.append(moved)
    body = {"episode": await player.episode(), "request_id": "move"}
    restored = await moved.ask("POST", "/v1/sessions/restore", body)
    assert await moved.ask("POST", "/v1/sessions/restore", body) == restored
    assert (restored["episode"], restored["step"]) == (0, 1)
    moved.session_id, moved.seen = restored["session_id"], list(player.seen)
    fleet.nodes[0].kill()
    try:
        await moved.step("b")
    finally:
        fleet.nodes[0].start()
        await whole(fleet)
    assert moved.seen == await undisturbed(fleet.nodes[1].url, 5, ["a", "b"], risk=0.0)


async def test_sessions_of_dropped_sockets_end_at_their_nodes(fleet: Fleet) -> None:
    # Those of sockets that other tests have closed linger.
    await no_session_left(fleet.nodes)
    async with websockets.connect(f"{fleet.one.url.replace('http', 'ws')}/v1/ws") as socket:
        await socket.send(orjson.dumps({"id": 1, "op": "make", "env_id": "Walk-v0", "count": 6}))
        assert len(orjson.loads(await socket.recv())["ok"]["sessions"]) == 6
        assert await sessions_at(fleet.nodes) == 6
        # Without a goodbye, as a client that dies.
        socket.transport.abort()
    await no_session_left(fleet.nodes)


async def test_lists_and_limits_are_the_gateways(fleet: Fleet, players: list[Player]) -> None:
    player = await Player(fleet.one.url, risk=0.0).begin(2)
    players.append(player)
    await player.step("a")
    found = (await player.ask("GET", "/v1/sessions?limit=1000"))["sessions"]
    own = next(info for info in found if info["session_id"] == player.session_id)
    assert (own["env_id"], own["episode"], own["step"], own["seed"]) == ("Walk-v0", 0, 1, 2)
    with pytest.raises(ProblemError, match="step_mismatch"):
        await player.ask(
            "POST", f"/v1/sessions/{player.session_id}/step", {"action": "x", "episode": 0, "step": 7}
        )
    await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
    with pytest.raises(ProblemError, match="session_gone") as gone:
        await player.step("b")
    assert gone.value.extra["reason"] == "closed"
    assert player.session_id in gone.value.detail


async def test_nodes_have_no_session_left_of_all_of_this(fleet: Fleet) -> None:
    """A node that was away is told which of its sessions went on elsewhere."""
    async with asyncio.timeout(30):
        while await sessions_at(fleet.nodes):
            await asyncio.sleep(0.1)


async def test_the_bytes_of_answers_that_are_passed_on_are_counted(fleet: Fleet) -> None:
    async def sent() -> float:
        async with httpx.AsyncClient() as http:
            lines = (await http.get(f"{fleet.upper.url}/metrics")).text.splitlines()
        of_sockets = [
            line for line in lines if line.startswith('rollgym_sent_bytes_total{transport="websocket"')
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in of_sockets)

    async with EnvClient(fleet.upper.url) as client:
        session = await client.make("FrozenLake-v0")
        await session.reset(seed=1)
        before = await sent()
        answers = [await session.step("Left") for _ in range(20)]
        assert await sent() - before > sum(len(answer[0]) for answer in answers)
        await session.close()
