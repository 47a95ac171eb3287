"""Several gateways before the same nodes: no answered step is lost, and no session lives twice."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.shared_journal import SharedJournal
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player, sessions_at, undisturbed
from tests.support.journal_fleet import GATEWAY, QUIET, WALKS, Fleet, patiently, whole_at
from tests.support.metrics import scrape, value
from tests.support.redis_server import RedisServer


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


@pytest.mark.parametrize("equal", [True, False])
async def test_steps_that_name_no_place_are_each_taken_once_through_two_gateways_at_one_moment(
    fleet: Fleet, players: list[Player], equal: bool
) -> None:
    """Those that are answered are all the steps that were taken; the others are refused, and were not taken."""
    (player,) = await begin(fleet, players, 1)
    path = f"/v1/sessions/{player.session_id}/step"
    refused = set()
    for number in range(20):
        actions = ["left", "left"] if equal else [f"left {number}", f"right {number}"]
        asked = [
            player.ask("POST", f"{gateway.url}{path}", {"action": action})
            for gateway, action in zip(fleet.gateways, actions, strict=True)
        ]
        for action, answer in zip(actions, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, ProblemError):
                refused.add(answer.code)
            else:
                assert answer["observation"].endswith(f" after {action}")
                player.seen.append(answer)
    assert refused <= {"busy"}
    player.seen.sort(key=lambda each: int(each["step"]))
    assert [each["step"] for each in player.seen] == list(range(len(player.seen)))
    actions = (await player.episode())["actions"]
    assert len(actions) == len(player.seen) - 1
    assert player.seen == await undisturbed(fleet.nodes[1].url, 0, actions, risk=0.0)
    assert await close_all(fleet, [player]) == 1


@pytest.mark.parametrize("what", ["node", "journal", "gateway"])
async def test_no_step_that_names_no_place_is_answered_as_the_one_of_another_client(
    fleet: Fleet, players: list[Player], what: str
) -> None:
    """Two clients take steps through two gateways, most of them equal ones, while something dies and comes back."""
    (player,) = await begin(fleet, players, 1)
    path = f"/v1/sessions/{player.session_id}/step"
    answered: list[int] = []
    others: set[str] = set()
    in_doubt: list[Exception] = []
    refused: list[ProblemError] = []
    is_whole = asyncio.Event()

    async def play(gateway: ServerProcess) -> None:
        left = 20
        while left:
            left -= is_whole.is_set()
            try:
                action = ("left", "left", "right")[len(answered) % 3]
                answer = await player.ask("POST", f"{gateway.url}{path}", {"action": action})
                others.update(
                    {answer["observation"]} - {f"at {answer['info']['state']['place']} after {action}"}
                )
                answered.append(answer["step"])
            except ProblemError as problem:
                is_unknown = "whether the step was taken is not known" in problem.detail
                (in_doubt if is_unknown else refused).append(problem)
                await asyncio.sleep(0.02)
            except httpx.TransportError as error:
                in_doubt.append(error)
                await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as playing:
        for gateway in fleet.gateways:
            playing.create_task(play(gateway))
        for dying in {"node": fleet.nodes, "journal": [fleet.journal], "gateway": fleet.gateways[1:]}[what]:
            before = len(answered)
            async with asyncio.timeout(30):
                while len(answered) < before + 10:
                    await asyncio.sleep(0.01)
            dying.kill()
            await asyncio.to_thread(dying.start)
        await whole_at(fleet.gateways, 2)
        is_whole.set()
    assert {problem.code for problem in refused} <= {"draining", "busy"}
    assert sorted(answered) == sorted(set(answered))
    assert not others, "an answer to another action"
    taken = len((await player.episode())["actions"])
    assert 0 <= taken - len(answered) <= len(in_doubt)
    assert await close_all(fleet, [player]) == 1


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


async def counted(gateway: ServerProcess, session_ids: set[str]) -> tuple[float, float, int]:
    """How many sessions a gateway has by its capacity and its metrics, and how many of these it lists."""
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        capacity = (await http.get("/v1/info")).json()["capacity"]["sessions"]
        listed = (await http.get("/v1/sessions?limit=1000")).json()["sessions"]
    measured = value(await scrape(gateway.url), "rollgym_sessions", {"env_id": "Walk-v0"})
    return capacity, measured, sum(each["session_id"] in session_ids for each in listed)


@pytest.mark.parametrize("hears", ["at once", "after it was cut off", "after the journal was started anew"])
async def test_what_is_closed_at_one_gateway_counts_at_no_other_one(
    fleet: Fleet, players: list[Player], hears: str
) -> None:
    closing, other = fleet.gateways
    before = await counted(other, set())
    both = await begin(fleet, players, 3)
    for player in both:
        await player.step("0", url=other.url)
    session_ids = {player.session_id for player in both}
    assert await counted(other, session_ids) == (before[0] + 3, before[1] + 3, 3)
    if hears != "at once":
        other.pause()
    if hears == "after it was cut off":
        fleet.journal.ask("CLIENT", "KILL", "TYPE", "pubsub")
    try:
        body = {"session_ids": sorted(session_ids)}
        assert await both[0].ask("POST", f"{closing.url}/v1/sessions/close", body) == {"closed": 3}
        if hears == "after the journal was started anew":
            fleet.journal.kill()
            fleet.journal.start()
    finally:
        other.resume()
    async with asyncio.timeout(20):
        while await counted(other, session_ids) != (*before[:2], 0):
            await asyncio.sleep(0.05)
    for player in both:
        with pytest.raises(ProblemError, match="session_gone") as gone:
            await player.step("1", url=other.url)
        assert gone.value.extra["reason"] == "closed"


async def test_a_step_beside_an_end_at_another_gateway_is_told_of_it(
    fleet: Fleet, players: list[Player]
) -> None:
    closing, other = fleet.gateways
    (player,) = await begin(fleet, players, 1)
    await player.step("0", url=other.url)
    for node in fleet.nodes:
        node.pause()
    try:
        step = asyncio.create_task(player.step("1", url=other.url))
        await player.ask("DELETE", f"{closing.url}/v1/sessions/{player.session_id}")
    finally:
        for node in fleet.nodes:
            node.resume()
    with pytest.raises(ProblemError, match="session_gone") as gone:
        await step
    assert gone.value.extra["reason"] == "closed"


async def test_a_node_is_told_of_an_end_by_whoever_is_asked_for_it_again(
    fleet: Fleet, players: list[Player]
) -> None:
    """A gateway may have written an end down, and not lived to tell the node."""
    before = await sessions_at(fleet.nodes)
    (player,) = await begin(fleet, players, 1)
    assert await sessions_at(fleet.nodes) == before + 1
    journal = SharedJournal(fleet.journal.url)
    await journal.start()
    assert [status for status, _, _ in await journal.end([player.session_id], "closed")] == ["ok"]
    await journal.close()
    answer = await player.http.delete(f"{fleet.gateways[1].url}/v1/sessions/{player.session_id}")
    assert answer.status_code < 500
    async with asyncio.timeout(20):
        while await sessions_at(fleet.nodes) > before:
            await asyncio.sleep(0.1)


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

    async def counted() -> float:
        return value(await scrape(fleet.gateways[0].url), "rollgym_steps_total", {"env_id": "Walk-v0"})

    before = await counted()
    assert fleet.journal.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK"
    try:
        with pytest.raises(ProblemError, match="draining") as full:
            await player.step("0")
        assert "journal" in full.value.detail
    finally:
        fleet.journal.ask("CONFIG", "SET", "maxmemory", "0")
    await patiently(player, "0")
    assert player.seen == await expected(fleet, 0, 1)
    assert await counted() == before + 1, "a step that is answered again was taken once"
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


async def test_no_gateway_goes_on_with_what_another_one_has_closed(
    fleet: Fleet, players: list[Player]
) -> None:
    """The journal fails over to a copy that lacks the end, and the nodes die."""
    both = await begin(fleet, players, 4)
    for player in both:
        await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
        assert fleet.journal.ask("HDEL", f"rollgym:session:{player.session_id}", "ended") == b":1"
    fleet.journal.kill()
    fleet.journal.start()
    for node in fleet.nodes:
        node.kill()
    for node in fleet.nodes:
        node.start()
    await whole_at(fleet.gateways, 2)
    for player in both:
        with pytest.raises(ProblemError, match="session_gone") as gone:
            await patiently(player, "0", url=fleet.gateways[1].url)
        assert gone.value.extra["reason"] == "closed"


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
