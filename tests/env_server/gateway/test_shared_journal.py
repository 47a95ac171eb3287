"""The journal that gateways share, by itself and with replicas: it never goes back, and what is damaged is missing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.journal_entries import (
    About,
    Claim,
    EpisodeStart,
    JournalAway,
    Opened,
    Step,
    Unreadable,
    begun,
    check,
    stepped,
    stepped_on,
    whole,
)
from rollgym.env_server.gateway.shared_journal import SharedJournal
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player, undisturbed
from tests.support.journal_fleet import GATEWAY, QUIET, WALKS, patiently, whole_at
from tests.support.redis_server import RedisServer

HEAD = EpisodeStart(7, None, "00" * 8, [])
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


def packed(*actions: str) -> list[bytes]:
    return [step(action).pack("S", 0, index) for index, action in enumerate(actions)]


def packed_text(action: str, index: int, *, flipped: bool = False) -> str:
    """A packed step as an argument on Redis' command line, of which one bit may be another one."""
    content = bytearray(step(action).pack("S", 0, index))
    content[-1] ^= flipped
    return content.decode("latin-1")


async def write(journal: SharedJournal, *arguments: Any) -> str:
    return await journal.written("S", tuple(arguments))


async def test_a_gateway_that_lost_its_lease_can_neither_write_nor_rebuild(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, other = journals
    assert await write(one, *stepped("S", 1, 0, 0, step("a"), (False, False))) == "ok"
    claim = await one.claim("S", 1)
    assert claim == Claim(2, 0, HEAD, [step("a")])
    # While one moves it, nobody writes, and nobody else moves it.
    assert await write(other, *stepped("S", 1, 0, 1, step("b"), (False, False))) == "fenced"
    assert await write(one, *stepped("S", 2, 0, 1, step("b"), (False, False))) == "moving"
    assert (await other.claim("S", 1), await other.claim("S", 2)) == ("fenced", "moving")
    # It falls silent for longer than its lease, and the other one takes over.
    server.ask("HSET", "rollgym:session:S", "until", "0")
    assert isinstance(await other.claim("S", 2), Claim)
    assert await one.renew("S", 2) == "fenced"
    assert await one.moved("S", 2, "elsewhere", "copy") == "fenced"
    assert await one.stays("S", 2) == "fenced"
    assert [status for status, _, _ in await one.end(["S"], "lost", 2)] == ["fenced"]
    assert await other.moved("S", 3, "elsewhere", "other copy") == "ok"
    assert await write(one, *stepped("S", 2, 0, 1, step("b"), (False, False))) == "fenced"
    assert await write(other, *stepped("S", 3, 0, 1, step("b"), (False, False))) == "ok"
    found = await one.load("S")
    assert found is not None
    assert (found.generation, found.node, found.upstream_id, found.steps) == (3, "elsewhere", "other copy", 2)


async def test_the_journal_never_goes_back(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    _, one, other = journals
    over = (False, False)
    for number, action in enumerate("abc"):
        assert await write(one, *stepped("S", 1, 0, number, step(action), over)) == "ok"
    assert await write(other, *stepped("S", 1, 0, 2, step("c"), over)) == "ok", (
        "what is written again is known"
    )
    assert await write(other, *stepped("S", 1, 0, 2, step("x"), over)) == "behind", (
        "another step was answered"
    )
    assert await write(other, *stepped("S", 1, 0, 4, step("e"), over)) == "gap", (
        "the step before it is not known"
    )
    assert await write(other, *whole("S", 1, 0, HEAD, over, packed("a"))) == "ok"
    assert await write(other, *whole("S", 1, 0, HEAD, over, packed("x"))) == "behind"
    assert await write(other, *whole("S", 1, 0, HEAD, over, packed(*"abcd"))) == "ok"
    found = await one.load("S")
    assert found is not None
    assert found.steps == 4


async def test_a_step_is_answered_to_one_claim(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    """Of equal steps that were numbered alike by two gateways, the node has taken one."""
    _, one, other = journals

    def place(index: int, claim: str = "") -> Any:
        return stepped("S", 1, 0, index, step("left"), (False, False), claim)

    assert await write(one, *place(0, "A")) == "ok"
    assert await write(other, *place(0, "B")) == "taken"
    assert await write(one, *place(0, "A")) == "ok", "written again, as after a connection that broke"
    assert await write(one, *place(0)) == "ok", "a client that names the place gets what is there"
    assert await write(other, *place(1)) == "ok"
    assert await write(one, *place(1, "A")) == "taken", "by a client that named it"
    # A gateway has found steps at the node that nobody has written down.
    assert await write(other, *whole("S", 1, 0, HEAD, (False, False), packed(*4 * ["left"]))) == "ok"
    assert await write(other, *place(4, "B")) == "ok"
    assert await write(one, *place(3, "A")) == "ok"
    assert await write(other, *place(3, "B")) == "taken"
    assert await write(one, *place(2)) == "ok"
    assert await write(other, *place(2, "B")) == "taken", "by a client that named it"
    for index in range(5, 12):
        assert await write(one, *place(index, f"A{index}")) == "ok"
    assert await write(other, *place(3, "A")) == "unsure", "it is not kept for ever whose a step was"


async def test_a_last_step_is_answered_to_one_claim(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    _, one, other = journals
    following = EpisodeStart(8, None, "22" * 8, [])
    for journal, claim, status in ((one, "A", "ok"), (other, "B", "taken"), (one, "A", "ok")):
        assert await write(journal, *stepped_on("S", 1, 0, 0, step("left"), following, claim)) == status
    assert await write(other, *stepped("S", 1, 1, 0, step("left"), (False, False), "B")) == "ok"


async def test_a_last_step_whose_next_episode_was_written_down_without_it_is_not_known(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    """It may be the one that the node has taken: to send it on would take it twice."""
    _, one, other = journals
    following = EpisodeStart(8, None, "22" * 8, [])
    assert await write(other, *whole("S", 1, 1, following, (False, False), [])) == "ok"
    assert await write(one, *stepped_on("S", 1, 0, 0, step("left"), following, "A")) == "unsure"
    assert await write(one, *stepped_on("S", 1, 0, 0, step("left"), following)) == "ok"


async def test_a_step_that_a_gateway_has_answered_is_nobody_elses_in_a_journal_that_went_back(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, other = journals
    over = (False, False)

    def place(index: int, claim: str) -> Any:
        return stepped("S", 1, 0, index, step("left"), over, claim)

    for name, number in (("answered_episode", "0"), ("answered_steps", "2")):
        server.ask("HSET", "rollgym:session:S", name, number)
    found = await one.load("S")
    assert found is not None
    assert (found.place, found.answered) == ((0, 0), (0, 2))
    assert await write(one, *place(0, "A")) == "unsure"
    assert await write(other, *whole("S", 1, 0, HEAD, over, packed(*4 * ["left"]))) == "ok"
    assert await write(one, *place(1, "A")) == "unsure"
    assert await write(one, *place(1, "")) == "ok", "a client that names the place gets what is there"
    assert await write(one, *place(2, "A")) == "ok"
    assert await write(other, *place(2, "B")) == "taken"


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
        assert await write(other, *whole("S", 1, 0, HEAD, (False, False), packed("one", "two"))) == "ok"
        claim = await other.claim("S", 1)
        assert isinstance(claim, Claim)
        assert claim.steps == steps
    finally:
        await knowing.close()


async def test_many_and_large_writes_are_shared_out(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    _, one, _ = journals
    large = [stepped("S", 1, 0, number, step("x" * 600_000), (False, False)) for number in range(12)]
    statuses = await asyncio.gather(
        *(write(one, *each) for each in large), *(write(one, *check(1)) for _ in range(3000))
    )
    assert statuses == ["ok"] * 3012
    found = await one.load("S")
    assert found is not None
    assert found.steps == 12
    ends = await one.end(["S", *(f"none-{number}" for number in range(3000))], "closed")
    assert [status for status, _, _ in ends] == ["ok"] + ["missing"] * 3000


async def test_what_has_ended_stays_so_where_the_journal_goes_back_behind_it(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, other = journals
    await one.open([Opened("T", WALK, "node", "up", 0, HEAD, (False, False), [], [])])
    assert await one.end(["S"], "closed") == [("ok", "node", "up")]
    # The other one has only heard of this end.
    assert await write(other, *check(1)) == "ended:closed"
    assert server.ask("HDEL", "rollgym:session:S", "ended") == b":1", "as in a replica that lagged"
    for journal in (one, other):
        found = await journal.load("S")
        assert found is not None
        assert found.ended == "closed"
    server.kill()
    server.start()
    async with asyncio.timeout(30):
        while server.ask("HGET", "rollgym:session:S", "ended") != b"$6":
            await asyncio.sleep(0.02)
    stranger = SharedJournal(server.url)
    await stranger.start()
    try:
        for session_id, ended in (("S", "closed"), ("T", None)):
            found = await stranger.load(session_id)
            assert found is not None
            assert found.ended == ended
    finally:
        await stranger.close()


HASH, STEPS = "rollgym:session:S", "rollgym:session:S:steps"
DAMAGES = {
    "a step of another place": ("LSET", STEPS, "1", packed_text("a", 0)),
    "a bit of a step": ("LSET", STEPS, "1", packed_text("c", 1, flipped=True)),
    "a step less": ("LPOP", STEPS),
    "a step twice": ("RPUSH", STEPS, packed_text("b", 1)),
    "another number of steps": ("HSET", HASH, "steps", "1"),
    "a number that is none": ("HSET", HASH, "steps", "2x"),
    "a time that is none": ("HSET", HASH, "ttl_ms", "6p0000"),
    "another episode": ("HSET", HASH, "episode", "1"),
    "no head": ("HDEL", HASH, "head"),
    "an empty head": ("HSET", HASH, "head", ""),
    "no facts": ("HDEL", HASH, "about"),
}


@pytest.mark.parametrize("how", DAMAGES)
async def test_what_is_damaged_is_missing_and_reported(
    journals: tuple[RedisServer, SharedJournal, SharedJournal], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, one, _ = journals
    for index, action in enumerate("ab"):
        assert await write(one, *stepped("S", 1, 0, index, step(action), (False, False))) == "ok"
    assert not server.ask(*DAMAGES[how]).startswith(b"-")
    found = await one.load("S")
    if found is not None:
        with suppress(Unreadable):
            assert await one.claim("S", 1) == "missing"
    assert one.damage == 1
    assert "S is damaged" in caplog.text or found is not None
    # The others are not concerned by it.
    await one.open([Opened("T", WALK, "node", "up", 0, HEAD, (False, False), [], [])])
    statuses = await asyncio.gather(*(one.written(each, tuple(check(1))) for each in "ST"))
    assert statuses[1] == "ok"
    assert one.trouble is None


async def test_entries_of_releases_without_checksums_are_read(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, _ = journals
    over = (False, False)
    for index, action in enumerate("ab"):
        assert await write(one, *stepped("S", 1, 0, index, step(action), over)) == "ok"
    bare = {"about": WALK.pack("S")[5:], "head": HEAD.pack("S", 0)[5:]}
    for name, content in bare.items():
        server.ask("HSET", HASH, name, content.decode("latin-1"))
    server.ask("LSET", STEPS, "0", step("a").pack("S", 0, 0)[5:].decode("latin-1"))
    # Written again by a gateway that has them.
    assert await write(one, *begun("S", 1, 0, HEAD)) == "ok"
    assert await write(one, *stepped("S", 1, 0, 0, step("a"), over)) == "ok"
    assert await one.claim("S", 1) == Claim(2, 0, HEAD, [step("a"), step("b")])
    assert one.damage == 0


async def test_steps_that_were_evicted_are_missing_and_not_made_up(
    journals: tuple[RedisServer, SharedJournal, SharedJournal],
) -> None:
    server, one, _ = journals
    assert await write(one, *stepped("S", 1, 0, 0, step("a"), (False, False))) == "ok"
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


CALLS: dict[str, Callable[[SharedJournal], Coroutine[Any, Any, object]]] = {
    "load": lambda journal: journal.load("S"),
    "claim": lambda journal: journal.claim("S", 1),
    "renew": lambda journal: journal.renew("S", 1),
    "moved": lambda journal: journal.moved("S", 1, "elsewhere", "copy"),
    "end": lambda journal: journal.end(["S"], "closed"),
    "written": lambda journal: journal.written("S", check(1)),
}


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_ends_as_cancelled_whenever_it_is_cancelled(
    journals: tuple[RedisServer, SharedJournal, SharedJournal], name: str, connected: bool
) -> None:
    """Also in the turn of the loop in which its command has just gone out: its caller would go on otherwise."""
    server, one, _ = journals
    if not connected:
        assert server.ask("CLIENT", "KILL", "TYPE", "normal").startswith(b":")
    server.pause()
    try:
        for turns in range(30):
            call = asyncio.create_task(CALLS[name](one))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled(), f"after {turns} turns of the loop: {call.exception()!r}"
    finally:
        server.resume()


# -- replicas --------------------------------------------------------------------------------------------------------


AT_ONCE = ("--repl-diskless-sync-delay", "0")
"""Without it, a replica begins five seconds late."""


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A server and its replica, which has all that there is."""
    places = tmp_path / "journal", tmp_path / "replica"
    for place in places:
        place.mkdir()
    with (
        RedisServer(places[0], *AT_ONCE) as server,
        RedisServer(places[1], *AT_ONCE, "--replicaof", "127.0.0.1", str(server.port)) as replica,
    ):
        deadline = time.monotonic() + 30
        while server.ask("WAIT", "1", "1000") != b":1":
            assert time.monotonic() < deadline
        yield server, replica


async def test_a_write_waits_for_the_replicas_that_are_required(
    replicated: tuple[RedisServer, RedisServer],
) -> None:
    server, replica = replicated
    careful, quick = SharedJournal(server.url, 1), SharedJournal(server.url)
    over = (False, False)
    for journal in (careful, quick):
        await journal.start()
    try:
        await careful.open([Opened("S", WALK, "node", "up", 0, HEAD, over, [], [])])
        assert await write(careful, *stepped("S", 1, 0, 0, step("a"), over)) == "ok"
        assert replica.ask("HGET", HASH, "steps") == b"$1"
        assert replica.ask("LLEN", STEPS) == b":1"
        replica.pause()
        assert (await write(quick, *stepped("S", 1, 0, 1, step("b"), over))) == "ok"
        # Whether it was written here before makes no difference: the replica lacks it.
        status = await write(careful, *stepped("S", 1, 0, 1, step("b"), over))
        assert status.startswith("away: 0 of 1 replicas (journal_replicas)")
        assert careful.calls["write", "unconfirmed"] == 1
        with pytest.raises(ProblemError, match="draining"):
            careful.require()
        with pytest.raises(JournalAway):
            await careful.load("S")
        replica.resume()
        async with asyncio.timeout(30):
            while careful.trouble is not None:
                await asyncio.sleep(0.02)
        assert await write(careful, *stepped("S", 1, 0, 1, step("b"), over)) == "ok"
        assert replica.ask("LLEN", STEPS) == b":2"
        assert await careful.end(["S"], "closed") == [("ok", "node", "up")]
        assert replica.ask("HGET", HASH, "ended") == b"$6"
    finally:
        replica.resume()
        for journal in (careful, quick):
            await journal.close()


async def test_a_journal_that_lacks_replicas_is_not_connected_to_all_the_time(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        journal = SharedJournal(server.url, 1)
        await journal.start(lambda: {"S": (0, 1)})
        await asyncio.sleep(4)
        async with Redis.from_url(server.url) as redis:
            stats = await redis.info("stats")
        await journal.close()
    assert stats["total_connections_received"] < 20


async def test_a_fail_over_loses_nothing_that_was_answered(
    replicated: tuple[RedisServer, RedisServer], players: list[Player], tmp_path: Path
) -> None:
    """The replica falls behind, and then takes over; the gateway that has answered is gone, and so is the node."""
    server, replica = replicated
    gateway = (*GATEWAY, "--journal-url", server.url, "--journal-replicas", "1")
    with ServerProcess(gateway) as one, ServerProcess(gateway) as other:
        node = (*WALKS, *QUIET, "--register", one.url, "--register", other.url)
        with ServerProcess(node) as first:
            await whole_at([one, other], 1)
            player = await Player(one.url, risk=0.0).begin(0)
            players.append(player)
            for number in range(3):
                await player.step(str(number))
            replica.pause()
            with pytest.raises(ProblemError, match="draining"):
                await player.step("3")
            for each in (server, one, first):
                each.kill()
            replica.resume()
            replica.take_port(server.port)
            place = tmp_path / "next"
            place.mkdir()
            follows = ("--replicaof", "127.0.0.1", str(replica.port))
            with RedisServer(place, *follows), ServerProcess(node):
                # The one that is gone counts for a minute.
                await whole_at([other], 2)
                await patiently(player, "3", url=other.url)
                await patiently(player, "4", url=other.url)
                direct = await undisturbed(other.url, 0, ["0", "1", "2", "3", "4"], risk=0.0)
    assert player.seen == direct
