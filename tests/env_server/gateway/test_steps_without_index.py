"""Steps without an index, through gateways that share a journal: each that is answered was taken once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rollgym.clients.net.connection import ConnectionLost
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.in_flight import InFlight
from rollgym.env_server.gateway.journal_entries import Claim, SharedSession
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.sessions.replies import Reply
from tests.support.client_server import ServerProcess
from tests.support.gateway_here import GatewayHere, gateway_here
from tests.support.journal_fleet import QUIET, WALKS
from tests.support.redis_server import RedisServer

NOT_KNOWN = "whether the step was taken is not known"


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with ServerProcess((*WALKS, *QUIET)) as running:
        yield running


class Gateways(NamedTuple):
    """Two gateways with one journal, and a session that was made through the first one."""

    journal: RedisServer
    one: GatewayHere
    other: GatewayHere
    session_id: str

    @property
    def key(self) -> str:
        """Of the session in the journal."""
        return f"rollgym:session:{self.session_id}"

    async def step(self, gateway: GatewayHere, action: str = "left") -> int:
        """Take a step without an index; return how many steps there are after it."""
        taken = await gateway.call("step", session_id=self.session_id, action=action)
        return int(taken["step"])

    async def actions(self) -> list[str]:
        """What the node has taken."""
        episode = await self.other.call("episode", session_id=self.session_id)
        return list(episode["actions"])


@pytest.fixture
async def gateways(node: ServerProcess, tmp_path: Path) -> AsyncIterator[Gateways]:
    with RedisServer(tmp_path) as journal:
        async with (
            gateway_here(journal_url=journal.url) as one,
            gateway_here(journal_url=journal.url) as other,
        ):
            for gateway in (one, other):
                await gateway.register(node)
            made = await one.call("make", env_id="Walk-v0", kwargs={"risk": 0.0}, reset={"seed": 3})
            yield Gateways(journal, one, other, made["session_id"])


# -- the journal goes back -------------------------------------------------------------------------------------------


async def go_back(gateways: Gateways) -> None:
    """Let the journal lose the last step, as after a fail-over to a copy that lagged."""
    journal, key = gateways.journal, gateways.key
    found = await gateways.one.journal.load(gateways.session_id)
    assert found is not None
    assert journal.ask("LTRIM", f"{key}:steps", "0", str(found.steps - 2)) == b"+OK"
    assert journal.ask("HSET", key, "steps", str(found.steps - 1)) == b":0"
    assert journal.ask("HDEL", key, f"by{found.steps - 1}") == b":1"


async def report(gateways: Gateways) -> None:
    """Let the gateways connect to the journal again, and tell it what they have answered."""
    gateways.journal.ask("CLIENT", "KILL", "TYPE", "pubsub")
    async with asyncio.timeout(20):
        while gateways.journal.ask("HEXISTS", gateways.key, "answered_steps") != b":1":
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("through", ["one", "one that has reported", "other"])
async def test_a_step_is_not_answered_with_one_that_the_journal_has_lost(
    gateways: Gateways, through: str
) -> None:
    """The node would repeat its answer to an equal step at the place that the journal has."""
    assert [await gateways.step(gateways.one) for _ in range(3)] == [1, 2, 3]
    await go_back(gateways)
    if through != "one":
        await report(gateways)
    assert await gateways.step(gateways.other if through == "other" else gateways.one) == 4
    assert await gateways.step(gateways.other) == 5
    assert await gateways.actions() == 5 * ["left"]


async def test_a_step_that_was_numbered_before_the_others_have_reported_is_not_known(
    gateways: Gateways,
) -> None:
    assert [await gateways.step(gateways.one) for _ in range(2)] == [1, 2]
    assert await gateways.step(gateways.other) == 3
    await go_back(gateways)
    load = gateways.one.journal.load

    async def load_early(session_id: str) -> SharedSession | None:
        gateways.one.journal.load = load  # type: ignore[method-assign]
        found = await load(session_id)
        await report(gateways)
        return found

    gateways.one.journal.load = load_early  # type: ignore[method-assign]
    with pytest.raises(ProblemError, match=NOT_KNOWN):
        await gateways.step(gateways.one)
    assert await gateways.step(gateways.one) == 4
    assert await gateways.actions() == 4 * ["left"]


async def test_a_session_whose_node_has_less_than_was_answered_is_lost(gateways: Gateways) -> None:
    """A gateway has reported what neither the journal nor the node has any more."""
    assert await gateways.step(gateways.one) == 1
    for name, number in (("answered_episode", "0"), ("answered_steps", "2")):
        assert gateways.journal.ask("HSET", gateways.key, name, number) == b":1"
    with pytest.raises(ProblemError, match="session_gone") as gone:
        await gateways.step(gateways.other)
    assert gone.value.extra["reason"] == "lost"


# -- steps whose answer does not come --------------------------------------------------------------------------------


def in_place_of_an_answer(gateway: GatewayHere, happens: Callable[[InFlight, Reply], object]) -> None:
    """Have something happen instead when the next answer of a node to a step comes."""
    relay = gateway.gateway.relay
    answered = relay.answered

    def answered_once(operation: InFlight, reply: Reply) -> None:
        if operation.op == "step":
            relay.answered = answered  # type: ignore[method-assign]
            happens(operation, reply)
        else:
            answered(operation, reply)

    relay.answered = answered_once  # type: ignore[method-assign]


async def test_a_step_is_not_known_if_its_answer_is_lost_and_then_the_journal_is_away(
    gateways: Gateways,
) -> None:
    """Its client would take `draining` for a step that was not taken."""
    assert await gateways.step(gateways.one) == 1

    def lose(operation: InFlight, reply: Reply) -> None:
        gateways.journal.pause()
        operation.lost(ConnectionLost("the connection broke"), sent=True)

    in_place_of_an_answer(gateways.one, lose)
    try:
        with pytest.raises(ProblemError, match=NOT_KNOWN) as problem:
            await gateways.step(gateways.one)
    finally:
        gateways.journal.resume()
    assert problem.value.code == "upstream_error"
    assert await gateways.actions() == ["left", "left"]


async def test_a_step_is_not_known_if_its_answer_cannot_be_read(gateways: Gateways) -> None:
    in_place_of_an_answer(gateways.one, lambda operation, reply: operation.answered({"episode": 0}))
    with pytest.raises(ProblemError, match=NOT_KNOWN) as problem:
        await gateways.step(gateways.one)
    assert problem.value.code == "upstream_error"
    assert await gateways.actions() == ["left"]


async def test_a_step_is_not_known_if_its_node_dies_with_it_and_no_other_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.env_server.gateway.relay.PATIENCE_S", 0.0)
    with RedisServer(tmp_path) as journal, ServerProcess((*WALKS, *QUIET)) as node:
        async with gateway_here(journal_url=journal.url) as gateway:
            await gateway.register(node)
            made = await gateway.call("make", env_id="Walk-v0", reset={"seed": 3})

            def lose(operation: InFlight, reply: Reply) -> None:
                node.kill()
                operation.lost(ConnectionLost("the connection broke"), sent=True)

            in_place_of_an_answer(gateway, lose)
            with pytest.raises(ProblemError, match=NOT_KNOWN) as problem:
                await gateway.call("step", session_id=made["session_id"], action="left")
    assert problem.value.code == "upstream_error"


@pytest.mark.parametrize("why", ["its answer is lost", "its session is about to be moved"])
async def test_a_gateway_that_ends_says_of_a_step_that_waits_again_that_it_is_not_known(
    gateways: Gateways, why: str
) -> None:
    one, other, session_id = gateways.one, gateways.other, gateways.session_id
    assert await gateways.step(one) == 1
    waits = asyncio.Event()
    ask_again = one.gateway.relay.ask_again

    def asked_again(operation: InFlight, *, gone: bool, after_s: float = 0.0) -> None:
        ask_again(operation, gone=gone, after_s=after_s)
        waits.set()

    def lose(operation: InFlight, reply: Reply) -> None:
        gateways.journal.pause()
        one.gateway.relay.ask_again = asked_again  # type: ignore[method-assign]
        operation.lost(ConnectionLost("the connection broke"), sent=True)

    async def be_moved(operation: InFlight, reply: Reply) -> None:
        assert isinstance(await other.journal.claim(session_id, operation.generation), Claim)
        one.gateway.relay.ask_again = asked_again  # type: ignore[method-assign]
        operation.answered(reply)

    moving: list[asyncio.Task[None]] = []
    if why == "its answer is lost":
        in_place_of_an_answer(one, lose)
    else:
        in_place_of_an_answer(
            one, lambda operation, reply: moving.append(asyncio.create_task(be_moved(operation, reply)))
        )
    step = asyncio.create_task(gateways.step(one))
    try:
        await waits.wait()
        await one.gateway.idle(0.0)
        await one.gateway.relay.shutdown()
        with pytest.raises(ProblemError, match=NOT_KNOWN) as problem:
            await step
    finally:
        gateways.journal.resume()
    assert problem.value.code == "upstream_error"


async def test_a_gateway_that_ends_sends_no_step_of_which_it_has_said_that_nothing_was_done(
    gateways: Gateways, node: ServerProcess
) -> None:
    """The end of the step before it would let it go."""
    one = gateways.one
    assert await gateways.step(one) == 1
    session = one.sessions.by_id[gateways.session_id]
    assert isinstance(session, RelayedSession)
    node.pause()
    try:
        steps = [asyncio.create_task(gateways.step(one, action)) for action in ("left", "right", "right")]
        async with asyncio.timeout(30):
            while not any(isinstance(each, InFlight) and not each.waits for each in session.underway):
                await asyncio.sleep(0.02)
        await one.gateway.idle(0.0)
        problems = await asyncio.gather(*steps, return_exceptions=True)
    finally:
        node.resume()
    codes = [each.code for each in problems if isinstance(each, ProblemError)]
    assert codes == ["upstream_error", "draining", "draining"]
    with pytest.raises(ProblemError, match="draining"):
        await gateways.step(one)
    assert "right" not in await gateways.actions()
