"""What happens to a session while the node is connected to that has it, as the shared journal says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollgym.clients.net.connection import Connection
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import ANYONE
from rollgym.env_server.gateway.registry import Registration
from rollgym.env_server.gateway.relayed_session import RelayedSession
from tests.support.client_server import ServerProcess
from tests.support.gateway_here import GatewayHere, gateway_here
from tests.support.journal_fleet import QUIET, WALKS
from tests.support.redis_server import RedisServer

WALK: dict[str, Any] = {"env_id": "Walk-v0", "kwargs": {"risk": 0.0}, "reset": {"seed": 3}}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[ServerProcess]]:
    with ServerProcess((*WALKS, *QUIET)) as one, ServerProcess((*WALKS, *QUIET)) as other:
        yield [one, other]


class Gateways(NamedTuple):
    """Two gateways with one journal; one has opened a session, of which the other one knows nothing yet."""

    one: GatewayHere
    other: GatewayHere
    session_id: str


@pytest.fixture
async def gateways(nodes: list[ServerProcess], tmp_path: Path) -> AsyncIterator[Gateways]:
    with RedisServer(tmp_path) as journal:
        async with (
            gateway_here(journal_url=journal.url) as one,
            gateway_here(journal_url=journal.url) as other,
        ):
            await one.register(nodes[0])
            made = await one.call("make", **WALK)
            yield Gateways(one, other, made["session_id"])
            await one.call("close", session_id=made["session_id"])


def while_connecting(registration: Registration, happens: Callable[[], Awaitable[object]]) -> None:
    """Have something happen once, between a connection to a node and the next step of the task that waited for it."""
    pool = registration.node.link(False).caller.pool
    connect = pool.connection

    async def connection(process: int | None) -> Connection:
        pool.connection = connect  # type: ignore[method-assign]
        found = await connect(process)
        await happens()
        return found

    pool.connection = connection  # type: ignore[method-assign]


def step(gateways: Gateways) -> Awaitable[Any]:
    return gateways.other.call("step", session_id=gateways.session_id, action="a", episode=0, step=0)


@pytest.mark.parametrize("closed_at", ["one", "other"])
async def test_a_session_that_is_closed_meanwhile_is_gone_and_counted_nowhere(
    gateways: Gateways, nodes: list[ServerProcess], closed_at: str
) -> None:
    # What a gateway adopts counts for the least loaded node until it is known where it is.
    registrations = [
        await gateways.other.register(node, weight=weight)
        for node, weight in zip(nodes, (0.1, 1.0), strict=True)
    ]
    closing: GatewayHere = getattr(gateways, closed_at)
    while_connecting(registrations[0], lambda: closing.call("close", session_id=gateways.session_id))
    with pytest.raises(ProblemError, match="session_gone") as gone:
        await step(gateways)
    assert gone.value.extra["reason"] == "closed"
    assert [each.sessions for each in registrations] == [0, 0]
    assert gateways.session_id not in gateways.other.sessions.by_id
    assert gateways.other.sessions.count() == 0


async def test_a_node_that_leaves_meanwhile_has_its_session_go_on_at_another_one(
    gateways: Gateways, nodes: list[ServerProcess]
) -> None:
    """It was a connection to a node that nobody can be sent to any more."""
    leaving = await gateways.other.register(nodes[0], weight=0.1)
    staying = await gateways.other.register(nodes[1])

    async def leave() -> None:
        await gateways.other.call("unregister", registration_id=leaving.registration_id)
        while leaving.node.registrations:
            await asyncio.sleep(0)

    while_connecting(leaving, leave)
    taken = await step(gateways)
    assert (taken["episode"], taken["step"]) == (0, 1)
    assert (leaving.sessions, staying.sessions) == (0, 1)


async def test_a_session_that_is_idle_at_one_gateway_outlives_its_node_for_another_one(
    gateways: Gateways, nodes: list[ServerProcess]
) -> None:
    """The node does not know it any more, nor that it was used through the other gateway a moment ago."""
    one, other, session_id = gateways
    await other.register(nodes[0])
    assert (await step(gateways))["step"] == 1
    await asyncio.to_thread(nodes[0].kill)
    await asyncio.to_thread(nodes[0].start)
    session = one.sessions.by_id[session_id]
    assert isinstance(session, RelayedSession)
    registration = session.home
    async with asyncio.timeout(20):
        await registration.node.link(False).caller.pool.connection(None)
    one.sessions.end(session, "evicted")
    async with asyncio.timeout(20):
        while registration.sessions:
            await asyncio.sleep(0.05)
    taken = await other.call("step", session_id=session_id, action="a", episode=0, step=1)
    assert taken["step"] == 2


@pytest.mark.parametrize("was_found", [False, True])
async def test_a_gateway_that_cannot_see_whether_a_session_is_used_ends_it_for_no_other_one(
    gateways: Gateways, nodes: list[ServerProcess], was_found: bool
) -> None:
    """It has not found the session, or has lost its node, when the session has been idle there for its time."""
    one, other, _ = gateways
    session_id = (await one.call("make", **WALK, idle_timeout_s=2.0))["session_id"]
    registration = await other.register(nodes[0] if was_found else nodes[1])
    if was_found:
        await other.call("step", session_id=session_id, action="a", episode=0, step=0)
        await registration.node.link(False).caller.pool.close()
    else:
        await other.gateway.relay.adopt(ANYONE, session_id)
    assert registration.sessions == 1
    number = int(was_found)
    async with asyncio.timeout(20):
        while registration.sessions:
            taken = await one.call("step", session_id=session_id, action="a", episode=0, step=number)
            number += 1
            assert taken["step"] == number
            await asyncio.sleep(0.1)
    taken = await one.call("step", session_id=session_id, action="a", episode=0, step=number)
    assert taken["step"] == number + 1
    await one.call("close", session_id=session_id)
