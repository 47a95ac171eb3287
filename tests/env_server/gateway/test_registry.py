"""How long registrations live, and what a gateway answers of environments whose servers are away: by an own clock."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.metrics import EnvironmentLabels, Metrics
from rollgym.env_server.gateway.registry import Registration, Registry, Roster
from rollgym.env_server.gateway.upstream.base import EnvironmentSpec
from rollgym.env_server.gateway.upstream.http import HttpUpstream
from rollgym.env_server.gateway.upstream.node import Node
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from tests.support.clock import clock, on_a_clock


def registration(
    env_id: str = "Guess", port: int = 9, *, protocol: str = "rollgym", ttl_s: float = 60.0
) -> Registration:
    target = Target(f"http://127.0.0.1:{port}", "127.0.0.1", port, "127.0.0.1")
    return Registration(
        env_id=env_id,
        owner="anybody",
        protocol=protocol,
        target=target,
        upstream_env_id=env_id,
        description="",
        spec=EnvironmentSpec(),
        upstream=HttpUpstream(target, None, TargetLimits(1, 1)),
        ttl_s=ttl_s,
        relay=Node(target, None, "anybody", 1) if protocol == "rollgym" else None,
    )


class Fleet:
    """A registry and its roster, as one start of a gateway has them."""

    def __init__(self, path: Path | None = None) -> None:
        self.roster = Roster(path)
        self.offered: set[str] = set()
        self.registry = Registry(
            lambda one: self.offered.add(one.env_id),
            self.offered.discard,
            Metrics(EnvironmentLabels(10)),
            self.roster,
        )

    def code(self, env_id: str) -> str | None:
        problem = self.roster.absence(env_id)
        return None if problem is None else problem.code


def test_a_registration_lives_by_its_heartbeats() -> None:
    async def live() -> None:
        fleet = Fleet()
        one = fleet.registry.add(registration(ttl_s=60.0))
        for _ in range(5):
            await clock().forward(59.0)
            assert fleet.offered == {"Guess"}
            fleet.registry.heartbeat(one, 0.5)
        assert one.load == 0.5
        await clock().forward(61.0)
        assert fleet.offered == set()
        with pytest.raises(ProblemError, match="unknown_registration"):
            fleet.registry.get(one.registration_id, None)
        await fleet.registry.shutdown()

    on_a_clock(live())


def test_a_server_that_failed_rests_for_a_while() -> None:
    async def rest() -> None:
        fleet = Fleet()
        one = fleet.registry.add(registration(port=1, ttl_s=3600.0))
        other = fleet.registry.add(registration(port=2, ttl_s=3600.0))
        fleet.registry.failed(one)
        assert await fleet.registry.place("Guess", 0.0) is other
        fleet.registry.failed(other)
        assert await fleet.registry.place("Guess", 0.0) is None
        waiting = asyncio.create_task(fleet.registry.place("Guess", 15.0))
        await clock().forward(6.0)
        assert await waiting is one
        await fleet.registry.shutdown()

    on_a_clock(rest())


def test_what_was_registered_before_a_restart_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "registrations.json"

    async def first() -> None:
        fleet = Fleet(path)
        fleet.registry.add(registration("Short", ttl_s=5.0))
        for port in (1, 2):
            fleet.registry.add(registration("Long", port, ttl_s=600.0))
        gone = fleet.registry.add(registration("Gone", protocol="http"))
        fleet.registry.remove(gone)
        await clock().forward(1.0)

    async def second() -> None:
        fleet = Fleet(path)
        assert fleet.roster.missing() == ["Long", "Short"]
        assert [fleet.code(each) for each in ("Short", "Long", "Gone")] == ["draining", "draining", None]
        problem = fleet.roster.absence("Long")
        assert problem is not None
        assert problem.extra["retry_after"] == 1
        await clock().forward(6.0)
        assert [fleet.code(each) for each in ("Short", "Long")] == [None, "draining"], "its time is over"
        fleet.registry.add(registration("Long", 1, ttl_s=600.0))
        assert fleet.roster.missing() == []
        assert fleet.offered == {"Long"}
        await clock().forward(1.0)

    async def third() -> None:
        """Killed again before all had come back: the replica that is still away is not forgotten."""
        fleet = Fleet(path)
        assert {each["url"][-1] for each in json.loads(path.read_text())} == {"1", "2"}
        await clock().forward(31.0)
        assert fleet.roster.missing() == [], "a gateway is ready in the end, whoever is gone for good"
        assert fleet.code("Long") == "draining"
        await clock().forward(90.0)
        assert fleet.code("Long") is None

    for start in (first, second, third):
        on_a_clock(start())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[{"env_id": 3}]', b"\xff\xfe", b'{"env_id": "A"}'])
def test_a_file_that_cannot_be_read_costs_no_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "registrations.json"
    path.write_bytes(content)

    async def start() -> None:
        fleet = Fleet(path)
        assert fleet.roster.missing() == []
        fleet.registry.add(registration("New"))
        await clock().forward(1.0)
        assert json.loads(path.read_text())[0]["env_id"] == "New"

    on_a_clock(start())


def test_a_disk_that_takes_nothing_costs_no_registration(tmp_path: Path) -> None:
    async def start() -> None:
        path = tmp_path / "later" / "registrations.json"
        fleet = Fleet(path)
        fleet.registry.add(registration("New"))
        await clock().forward(1.0)
        assert fleet.offered == {"New"}
        path.parent.mkdir()
        await clock().forward(10.0)
        assert json.loads(path.read_text())[0]["env_id"] == "New", "it is written once the disk takes it"

    on_a_clock(start())


def test_a_node_that_left_may_be_starting_again() -> None:
    async def restart() -> None:
        fleet = Fleet()
        fleet.registry.remove(fleet.registry.add(registration()))
        assert fleet.code("Guess") == "draining"
        one = fleet.registry.add(registration())
        assert fleet.code("Guess") is None
        fleet.registry.remove(one)
        await clock().forward(61.0)
        assert fleet.code("Guess") is None
        assert fleet.code("Never") is None

    on_a_clock(restart())


@pytest.mark.parametrize("protocol", ["http", "gem"])
def test_a_third_partys_registration_is_named_when_it_has_expired(protocol: Any) -> None:
    async def expire() -> None:
        fleet = Fleet()
        one = fleet.registry.add(registration(protocol=protocol))
        fleet.registry.remove(one)
        assert fleet.code("Guess") is None, "it was ended on purpose"
        fleet.registry.add(registration(protocol=protocol))
        await clock().forward(61.0)
        problem = fleet.roster.absence("Guess")
        assert problem is not None
        assert problem.code == "unknown_env"
        for part in ("http://127.0.0.1:9", "expired", "60 s", "--keep"):
            assert part in problem.detail
        fleet.registry.add(registration(protocol=protocol))
        assert fleet.code("Guess") is None

    on_a_clock(expire())
