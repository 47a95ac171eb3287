"""Several gateways before the same nodes: no answered step is lost, and no session lives twice."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.journal_entries import (
    About,
    Claim,
    Head,
    JournalAway,
    Opened,
    Step,
    check,
    stepped,
    whole,
)
from rollgym.env_server.gateway.shared_journal import SharedJournal
from tests.env_server.gateway.test_relay import Player, sessions_at, undisturbed
from tests.support.client_server import ServerProcess
from tests.support.metrics import scrape, value
from tests.support.redis_server import RedisServer

QUIET = ("--log-level", "error")
GATEWAY = ("--gateway", "--allow-network", "loopback", *QUIET)
WALKS = ("--no-builtin", "--env", "Walk-v0=tests.support.client_envs:Walk", "--isolation", "Walk-v0=inline")


class Fleet(NamedTuple):
    """Gateways that share a journal, and nodes that are registered with all of them."""

    journal: RedisServer
    gateways: list[ServerProcess]
    nodes: list[ServerProcess]


async def whole_at(gateways: list[ServerProcess], nodes: int) -> None:
    """Wait until all nodes are registered with all gateways."""
    async with httpx.AsyncClient() as http, asyncio.timeout(60):
        for gateway in gateways:
            while True:
                found = (await http.get(f"{gateway.url}/v1/envs")).json().get("envs", [])
                if [env["replicas"] for env in found] == [nodes]:
                    break
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with RedisServer(tmp_path_factory.mktemp("journal")) as journal:
        gateway = (*GATEWAY, "--journal-url", journal.url)
        with ServerProcess(gateway) as one, ServerProcess(gateway) as other:
            node = (*WALKS, *QUIET, "--register", one.url, "--register", other.url)
            # What this one has on disk is a copy of the past once its sessions went on elsewhere.
            state = str(tmp_path_factory.mktemp("state"))
            with ServerProcess((*node, "--state-dir", state)) as first, ServerProcess(node) as second:
                found = Fleet(journal, [one, other], [first, second])
                asyncio.run(whole_at(found.gateways, 2))
                yield found


@pytest.fixture
async def players() -> AsyncIterator[list[Player]]:
    made: list[Player] = []
    yield made
    for player in made:
        await player.http.aclose()


async def begin(fleet: Fleet, players: list[Player], count: int) -> list[Player]:
    found = [await Player(fleet.gateways[0].url, risk=0.0).begin(seed) for seed in range(count)]
    players.extend(found)
    return found


async def expected(fleet: Fleet, seed: int, steps: int) -> list[Any]:
    return await undisturbed(fleet.nodes[1].url, seed, [str(number) for number in range(steps)], risk=0.0)


async def unnumbered(player: Player, action: str, url: str) -> dict[str, Any]:
    """A step that names no place."""
    path = f"{url}/v1/sessions/{player.session_id}/step"
    player.seen.append(await player.ask("POST", path, {"action": action}))
    return player.seen[-1]


async def close_all(fleet: Fleet, players: list[Player]) -> int:
    body = {"session_ids": [player.session_id for player in players]}
    closed = await players[0].ask("POST", f"{fleet.gateways[1].url}/v1/sessions/close", body)
    return int(closed["closed"])


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_gateway_that_saw_half_of_the_steps_rebuilds_all_of_them(
    fleet: Fleet, players: list[Player], numbered: bool
) -> None:
    both = await begin(fleet, players, 4)
    for number in range(10):
        gateway = fleet.gateways[number >= 5]
        for player in both:
            await player.step(str(number), url=gateway.url)
    fleet.nodes[0].kill()
    try:
        for player in both:
            if numbered:
                await player.step("10", url=fleet.gateways[0].url)
            else:
                await unnumbered(player, "10", fleet.gateways[0].url)
    finally:
        # It comes back with copies of the past, which nobody may be answered from.
        fleet.nodes[0].start()
        await whole_at(fleet.gateways, 2)
    for player in both:
        await unnumbered(player, "11", fleet.gateways[1].url)
        await player.step("12", url=fleet.gateways[0].url)
    assert [player.seen for player in both] == [await expected(fleet, seed, 13) for seed in range(4)]
    assert await close_all(fleet, both) == 4
    async with asyncio.timeout(20):
        while await sessions_at(fleet.nodes):
            await asyncio.sleep(0.05)


async def test_one_gateway_at_a_time_rebuilds(fleet: Fleet, players: list[Player]) -> None:
    """Both are asked for the same step of the same sessions at once, and leave one copy of each."""
    both = await begin(fleet, players, 8)
    for player in both:
        await player.step("0")
    fleet.nodes[0].kill()
    try:
        asked = []
        for player in both:
            body = {"action": "1", "episode": 0, "step": 1}
            for gateway in fleet.gateways:
                path = f"{gateway.url}/v1/sessions/{player.session_id}/step"
                asked.append(player.ask("POST", path, body))
        answers = await asyncio.gather(*asked)
        assert answers[::2] == answers[1::2]
        async with asyncio.timeout(20):
            while await sessions_at(fleet.nodes[1:]) != len(both):
                await asyncio.sleep(0.05)
        for player, answer in zip(both, answers[::2], strict=True):
            player.seen.append(answer)
            await player.step("2", url=fleet.gateways[1].url)
    finally:
        fleet.nodes[0].start()
        await whole_at(fleet.gateways, 2)
    assert [player.seen for player in both] == [await expected(fleet, seed, 3) for seed in range(8)]
    assert await close_all(fleet, both) == 8


async def test_what_one_gateway_ends_is_ended_for_all(fleet: Fleet, players: list[Player]) -> None:
    (player,) = await begin(fleet, players, 1)
    await player.step("0", url=fleet.gateways[1].url)
    (copy_id,) = (await player.ask("POST", f"/v1/sessions/{player.session_id}/fork", {"count": 1}))[
        "session_ids"
    ]
    copy = Player(fleet.gateways[1].url)
    players.append(copy)
    copy.session_id, copy.seen = copy_id, list(player.seen)
    await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
    for gateway in fleet.gateways:
        with pytest.raises(ProblemError, match="session_gone") as gone:
            await player.step("1", url=gateway.url)
        assert gone.value.extra["reason"] == "closed"
    assert await close_all(fleet, [player]) == 0
    for number, gateway in ((1, fleet.gateways[1]), (2, fleet.gateways[0])):
        await copy.step(str(number), url=gateway.url)
    assert copy.seen == await expected(fleet, 0, 3)
    assert await close_all(fleet, [copy]) == 1


async def test_episodes_begin_through_any_gateway(fleet: Fleet, players: list[Player]) -> None:
    """Resets, and steps that begin the next episode, are written down like steps."""
    (player,) = await begin(fleet, players, 1)
    reset = f"/v1/sessions/{player.session_id}/reset"
    for number, gateway in enumerate((*fleet.gateways, *fleet.gateways)):
        begun = await player.ask("POST", f"{gateway.url}{reset}", {"seed": 100 + number})
        assert (begun["episode"], begun["step"]) == (number + 1, 0)
        player.seen = [begun]
        await player.step("a", url=gateway.url)
    for node in (0, 1):
        fleet.nodes[node].kill()
        try:
            await player.step(f"b{node}", url=fleet.gateways[node].url)
        finally:
            fleet.nodes[node].start()
            await whole_at(fleet.gateways, 2)
    again = await undisturbed(fleet.nodes[1].url, 103, ["a", "b0", "b1"], risk=0.0)
    assert [step["observation"] for step in player.seen] == [step["observation"] for step in again]
    assert await close_all(fleet, [player]) == 1


async def test_nothing_is_answered_while_the_journal_is_away(fleet: Fleet, players: list[Player]) -> None:
    """Killed and started anew, and silent: all is retryable and nothing is lost."""
    (player,) = await begin(fleet, players, 1)
    await player.step("0")
    fleet.journal.kill()
    for _ in range(2):
        with pytest.raises(ProblemError, match="draining") as away:
            await player.step("1")
        assert away.value.extra["retry_after"] > 0
    for method, path, body in (
        ("POST", "/v1/sessions", {"env_id": "Walk-v0"}),
        ("DELETE", f"/v1/sessions/{player.session_id}", None),
        ("GET", f"/v1/sessions/{player.session_id}/episode", None),
    ):
        with pytest.raises(ProblemError, match="draining"):
            await player.ask(method, path, body)
    reasons = (await player.http.get("/ready")).json()
    assert "journal" in str(reasons)
    assert str(fleet.journal.port) not in away.value.detail, "where it is is nobody's business"
    fleet.journal.start()
    await patiently(player, "1")
    fleet.journal.pause()
    with pytest.raises(ProblemError, match="draining"):
        await player.step("2")
    fleet.journal.resume()
    await patiently(player, "2")
    await player.step("3", url=fleet.gateways[1].url)
    assert player.seen == await expected(fleet, 0, 4)
    assert await close_all(fleet, [player]) == 1


async def patiently(player: Player, action: str) -> None:
    """A step as a client takes it, which asks again when it is told to."""
    async with asyncio.timeout(30):
        while True:
            try:
                await player.step(action)
            except ProblemError as problem:
                if problem.code != "draining":
                    raise
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_step_that_could_not_be_written_down_is_not_taken_twice(
    fleet: Fleet, players: list[Player]
) -> None:
    """The node has taken it when the journal falls silent; whoever names no place is told that it is not known."""
    (player,) = await begin(fleet, players, 1)
    step = asyncio.create_task(player.step("0"))
    fleet.journal.ask("CLIENT", "PAUSE", "3000", "WRITE")
    await asyncio.wait([step])
    if not isinstance(step.exception(), ProblemError):
        pytest.skip("the step was written down first")
    assert step.exception().code == "draining"  # type: ignore[union-attr]
    await patiently(player, "0")
    await player.step("1", url=fleet.gateways[1].url)
    assert player.seen == await expected(fleet, 0, 2)
    assert await close_all(fleet, [player]) == 1


async def test_a_journal_that_is_full_refuses_and_goes_on_when_it_is_not(
    fleet: Fleet, players: list[Player]
) -> None:
    (player,) = await begin(fleet, players, 1)
    assert fleet.journal.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK"
    try:
        with pytest.raises(ProblemError, match="draining") as full:
            await player.step("0")
        assert "journal" in full.value.detail
    finally:
        fleet.journal.ask("CONFIG", "SET", "maxmemory", "0")
    await patiently(player, "0")
    assert player.seen == await expected(fleet, 0, 1)
    assert await close_all(fleet, [player]) == 1


async def test_what_the_journal_has_lost_is_lost_and_the_client_restores_it(fleet: Fleet) -> None:
    async with EnvClient(fleet.gateways[0].url) as client, EnvClient(fleet.nodes[1].url) as direct:
        session, twin = [await each.make("Walk-v0", {"risk": 0.0}) for each in (client, direct)]
        assert await session.reset(3) == await twin.reset(3)
        assert await session.step("a") == await twin.step("a")
        before = session.session_id
        fleet.journal.ask("FLUSHALL")
        async with httpx.AsyncClient(base_url=fleet.gateways[1].url) as http:
            gone = (await http.post(f"/v1/sessions/{before}/step", json={"action": "b"})).json()
        assert (gone["code"], gone["reason"]) == ("session_gone", "lost")
        assert await session.step("b") == await twin.step("b")
        assert session.session_id != before


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_journal_that_went_back_takes_no_session_with_it(
    fleet: Fleet, players: list[Player], numbered: bool
) -> None:
    both = await begin(fleet, players, 8)
    healed, concerned = both[:2], both[2:]
    keys = [f"rollgym:session:{player.session_id}" for player in both]
    for number in range(5):
        for player in both:
            await player.step(str(number))
    for number in range(5, 8):
        for player in both:
            await player.step(str(number))
    # As after a fail-over to a copy that lagged.
    for key in keys:
        assert fleet.journal.ask("LTRIM", f"{key}:steps", "0", "4") == b"+OK"
        assert fleet.journal.ask("HSET", key, "steps", "5") == b":0"
    for player in healed:
        await player.step("8")
    for node in fleet.nodes:
        node.kill()
    for node in fleet.nodes:
        node.start()
    await whole_at(fleet.gateways, 2)
    for player in healed:
        await player.step("9")
        assert player.seen == (await expected(fleet, both.index(player), 10))
    for player in concerned:
        with suppress(ProblemError):
            if numbered:
                await player.step("8")
            else:
                await unnumbered(player, "8", fleet.gateways[0].url)
            # Its node has a journal of its own, which had not gone back.
            assert player.seen == (await expected(fleet, both.index(player), 9))
    assert {await lost(fleet, player) for player in concerned} >= {"lost"}
    await close_all(fleet, both)


async def test_no_gateway_goes_back_behind_what_another_one_has_answered(
    fleet: Fleet, players: list[Player]
) -> None:
    """One gateway answers the last steps, the journal fails over to a copy that lacks these, and the nodes die."""
    first, second = fleet.gateways
    all_of_them = await begin(fleet, players, 6)
    for player in all_of_them:
        for number in range(6):
            await player.step(str(number), url=(first if number < 5 else second).url)
        key = f"rollgym:session:{player.session_id}"
        assert fleet.journal.ask("LTRIM", f"{key}:steps", "0", "4") == b"+OK"
        assert fleet.journal.ask("HSET", key, "steps", "5") == b":0"
    fleet.journal.kill()
    fleet.journal.start()
    for node in fleet.nodes:
        node.kill()
    for node in fleet.nodes:
        node.start()
    await whole_at(fleet.gateways, 2)
    ends = set()
    for player in all_of_them:
        try:
            answer = await unnumbered(player, "6", first.url)
        except ProblemError as problem:
            ends.add(problem.extra.get("reason", problem.code))
        else:
            # Its node has a journal of its own, which had not gone back.
            assert answer["step"] == 7
    assert ends == {"lost"}
    await close_all(fleet, all_of_them)


@pytest.mark.parametrize("what", ["head", "about", "steps"])
async def test_what_cannot_be_read_is_lost(fleet: Fleet, players: list[Player], what: str) -> None:
    both = await begin(fleet, players, 2)
    for player in both:
        await player.step("0")
        key = f"rollgym:session:{player.session_id}"
        if what == "steps":
            assert fleet.journal.ask("LSET", f"{key}:steps", "0", "no step") == b"+OK"
        else:
            assert fleet.journal.ask("HSET", key, what, "nothing of the kind") == b":0"
    for node in fleet.nodes:
        node.kill()
    for node in fleet.nodes:
        node.start()
    await whole_at(fleet.gateways, 2)
    reasons = [await lost(fleet, player) for player in both]
    # One of the nodes keeps journals: there, steps have not to be taken anew.
    assert sorted(reasons) == (["", "lost"] if what == "steps" else ["lost", "lost"])
    await close_all(fleet, both)


async def lost(fleet: Fleet, player: Player) -> str:
    """Why all gateways say that a session is gone; nothing where it goes on."""
    reasons = set()
    for gateway in fleet.gateways:
        try:
            await player.step("1", url=gateway.url)
        except ProblemError as problem:
            reasons.add(problem.extra.get("reason", problem.code))
    assert len(reasons) < 2
    return reasons.pop() if reasons else ""


async def test_a_gateway_dies_and_another_one_goes_on(fleet: Fleet, players: list[Player]) -> None:
    both = await begin(fleet, players, 4)
    for player in both:
        await player.step("0")
    fleet.gateways[0].kill()
    fleet.nodes[0].kill()
    try:
        for player in both:
            await player.step("1", url=fleet.gateways[1].url)
    finally:
        fleet.gateways[0].start()
        fleet.nodes[0].start()
        await whole_at(fleet.gateways, 2)
    for player in both:
        await player.step("2")
    assert [player.seen for player in both] == [await expected(fleet, seed, 3) for seed in range(4)]
    assert await close_all(fleet, both) == 4


async def test_an_operator_sees_what_the_journal_takes_and_how_long(
    fleet: Fleet, players: list[Player]
) -> None:
    url = fleet.gateways[0].url
    before = await scrape(url)
    [player] = await begin(fleet, players, 1)
    for action in "abc":
        await player.step(action)
    await close_all(fleet, [player])
    after = await scrape(url)

    def grown(name: str, **labels: str) -> float:
        name = f"rollgym_shared_journal_{name}"
        return value(after, name, labels) - value(before, name, labels)

    assert value(after, "rollgym_shared_journal_up") == 1
    assert value(after, "rollgym_shared_journal_waiting") == 0
    assert grown("writes_total", status="ok") == grown("write_seconds_count") >= 3
    assert 0 < grown("write_seconds_sum") < 60
    for command in ("open", "write"):
        calls = grown("calls_total", command=command, outcome="ok")
        assert calls == grown("call_seconds_count", command=command) >= 1
    assert grown("sent_bytes_total") > 0
    assert grown("calls_total", command="write", outcome="away") == 0


async def test_nothing_is_left_of_all_of_this(fleet: Fleet) -> None:
    async with asyncio.timeout(30):
        while await sessions_at(fleet.nodes) > 1:
            # The twin of the restored session is closed with its client, which may take a moment.
            await asyncio.sleep(0.1)


# -- the journal by itself -------------------------------------------------------------------------------------------

HEAD = Head(7, None, "00" * 8, [])
WALK = About("Walk-v0", "0", {}, 60.0, None)


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[tuple[RedisServer, SharedJournal, SharedJournal]]:
    """A server, and two gateways' journals there, with one session."""
    with RedisServer(tmp_path) as server:
        both = SharedJournal(server.url), SharedJournal(server.url)
        for journal in both:
            await journal.start()
        await both[0].open([Opened("S", WALK, "node", "up", 0, HEAD, (False, False), [], [])])
        yield server, *both
        for journal in both:
            await journal.close()


def step(action: str) -> Step:
    return Step(action, "11" * 8)


async def write(journal: SharedJournal, *arguments: Any) -> str:
    return await journal.written("S", tuple(arguments))


async def test_a_gateway_that_lost_its_lease_can_neither_write_nor_rebuild(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, other = journals
    assert await write(one, *stepped(1, 0, 0, step("a"), (False, False))) == "ok"
    claim = await one.claim("S", 1)
    assert claim == Claim(2, 0, HEAD, [step("a")])
    # While one moves it, nobody writes, and nobody else moves it.
    assert await write(other, *stepped(1, 0, 1, step("b"), (False, False))) == "fenced"
    assert await write(one, *stepped(2, 0, 1, step("b"), (False, False))) == "moving"
    assert (await other.claim("S", 1), await other.claim("S", 2)) == ("fenced", "moving")
    # It falls silent for longer than its lease, and the other one takes over.
    server.ask("HSET", "rollgym:session:S", "until", "0")
    assert isinstance(await other.claim("S", 2), Claim)
    assert await one.renew("S", 2) == "fenced"
    assert await one.moved("S", 2, "elsewhere", "copy") == "fenced"
    assert await one.stays("S", 2) == "fenced"
    assert [status for status, _, _ in await one.end(["S"], "lost", 2)] == ["fenced"]
    assert await other.moved("S", 3, "elsewhere", "other copy") == "ok"
    assert await write(one, *stepped(2, 0, 1, step("b"), (False, False))) == "fenced"
    assert await write(other, *stepped(3, 0, 1, step("b"), (False, False))) == "ok"
    found = await one.load("S")
    assert found is not None
    assert (found.generation, found.node, found.upstream_id, found.steps) == (3, "elsewhere", "other copy", 2)


async def test_the_journal_never_goes_back(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    _, one, other = journals
    over = (False, False)
    for number, action in enumerate("abc"):
        assert await write(one, *stepped(1, 0, number, step(action), over)) == "ok"
    assert await write(other, *stepped(1, 0, 2, step("c"), over)) == "ok", "what is written again is known"
    assert await write(other, *stepped(1, 0, 2, step("x"), over)) == "behind", "another step was answered"
    assert await write(other, *stepped(1, 0, 4, step("e"), over)) == "gap", "the step before it is not known"
    assert await write(other, *whole(1, 0, HEAD, over, [step("a").pack()])) == "ok"
    assert await write(other, *whole(1, 0, HEAD, over, [step("x").pack()])) == "behind"
    assert await write(other, *whole(1, 0, HEAD, over, [step(each).pack() for each in "abcd"])) == "ok"
    found = await one.load("S")
    assert found is not None
    assert found.steps == 4


async def test_what_a_gateway_has_answered_is_not_gone_back_behind(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, other = journals
    places = {"S": (0, 2), "none": (3, 1)}
    async with asyncio.timeout(30):
        while one.settling_s or other.settling_s:
            await asyncio.sleep(0.1)
    await one.close()
    knowing = SharedJournal(server.url)
    await knowing.start(lambda: places)
    try:
        async with asyncio.timeout(30):
            while server.ask("HGET", "rollgym:session:S", "answered_steps") != b"$1":
                await asyncio.sleep(0.02)
        assert knowing.settling_s > 0
        assert await other.claim("S", 1) == "behind"
        # Its node still has the steps, and they are written down again.
        steps = [step("one"), step("two")]
        assert await write(other, *whole(1, 0, HEAD, (False, False), [each.pack() for each in steps])) == "ok"
        claim = await other.claim("S", 1)
        assert isinstance(claim, Claim)
        assert claim.steps == steps
    finally:
        await knowing.close()


async def test_many_and_large_writes_are_shared_out(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    _, one, _ = journals
    large = [stepped(1, 0, number, step("x" * 600_000), (False, False)) for number in range(12)]
    statuses = await asyncio.gather(
        *(write(one, *each) for each in large), *(write(one, *check(1)) for _ in range(3000))
    )
    assert statuses == ["ok"] * 3012
    found = await one.load("S")
    assert found is not None
    assert found.steps == 12
    ends = await one.end(["S", *(f"none-{number}" for number in range(3000))], "closed")
    assert [status for status, _, _ in ends] == ["ok"] + ["missing"] * 3000


async def test_steps_that_were_evicted_are_missing_and_not_made_up(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, _ = journals
    assert await write(one, *stepped(1, 0, 0, step("a"), (False, False))) == "ok"
    server.ask("DEL", "rollgym:session:S:steps")
    assert await one.claim("S", 1) == "missing"
    assert await one.load("S") is None
    assert await write(one, *check(1)) == "missing"


async def test_a_journal_that_is_away_is_tried_no_further_until_it_is_back(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, _ = journals
    server.kill()
    statuses = await asyncio.gather(*(write(one, *check(1)) for _ in range(50)))
    assert all(status.startswith("away: ") for status in statuses)
    assert (one.writes["away"], one.calls["write", "away"], one.waiting) == (50, 1, 0)
    with pytest.raises(JournalAway):
        await one.load("S")
    with pytest.raises(ProblemError, match="draining"):
        one.require()
    server.start()
    async with asyncio.timeout(20):
        while one.trouble is not None:
            await asyncio.sleep(0.02)
    assert await write(one, *check(1)) == "ok"


# -- what an operator gets wrong -------------------------------------------------------------------------------------


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollgym.env_server", "--gateway", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_an_address_that_is_none_is_refused_without_showing_it() -> None:
    ended = serve("--journal-url", "memcached://user:secret@127.0.0.1/0")
    assert ended.returncode == 2
    assert "journal_url cannot be read" in ended.stderr
    assert "secret" not in ended.stderr


def test_a_gateway_waits_for_a_journal_that_is_not_there_yet(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with ServerProcess((*GATEWAY, "--journal-url", server.url)) as gateway:
        answer = httpx.get(f"{gateway.url}/ready")
        assert (answer.status_code, [each["code"] for each in answer.json()["reasons"]]) == (503, ["journal"])
        with server:
            deadline = time.monotonic() + 30
            while httpx.get(f"{gateway.url}/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
