"""Metrics: stable names, labels that nobody outside chooses, the same figures over several processes."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.metrics import EnvironmentLabels, Metrics
from rollgym.env_server.operations.server_metrics import SERVER_METRICS
from tests.support.client_server import ServerProcess
from tests.support.metrics import Samples, scrape, value
from tests.support.processes import ROOT
from tests.support.wire import ENVS, INLINE, Server

NAMES = {
    "rollgym_build_info": ("gauge", {"version", "role"}),
    "rollgym_processes": ("gauge", set()),
    "rollgym_process_restarts_total": ("counter", set()),
    "rollgym_ready": ("gauge", set()),
    "rollgym_event_loop_lag_seconds": ("histogram", set()),
    "rollgym_event_loop_queued_seconds_total": ("counter", set()),
    "rollgym_event_loop_holds_total": ("counter", {"env_id", "op", "isolation"}),
    "rollgym_operations_total": ("counter", {"op", "code"}),
    "rollgym_problems_total": ("counter", {"code"}),
    "rollgym_refusals_total": ("counter", {"reason"}),
    "rollgym_operation_seconds": ("histogram", {"op"}),
    "rollgym_environment_seconds": ("histogram", {"op", "isolation"}),
    "rollgym_queue_seconds": ("histogram", {"op", "isolation"}),
    "rollgym_sessions": ("gauge", {"env_id"}),
    "rollgym_max_sessions": ("gauge", set()),
    "rollgym_sessions_ended_total": ("counter", {"reason"}),
    "rollgym_steps_total": ("counter", {"env_id"}),
    "rollgym_resets_total": ("counter", {"env_id"}),
    "rollgym_expert_resets_total": ("counter", {"env_id"}),
    "rollgym_episodes_total": ("counter", {"env_id", "outcome"}),
    "rollgym_verdicts_total": ("counter", {"env_id", "outcome"}),
    "rollgym_runs_total": ("counter", {"outcome"}),
    "rollgym_rebuilds_total": ("counter", {"env_id", "outcome"}),
    "rollgym_received_bytes_total": ("counter", {"transport"}),
    "rollgym_sent_bytes_total": ("counter", {"transport"}),
    "rollgym_sockets": ("gauge", set()),
    "rollgym_sockets_opened_total": ("counter", set()),
    "rollgym_worker_processes": ("gauge", set()),
    "rollgym_worker_memory_bytes": ("gauge", set()),
    "rollgym_worker_restarts_total": ("counter", {"reason"}),
    "rollgym_stuck_threads": ("gauge", set()),
    "rollgym_journal_bytes": ("gauge", set()),
    "rollgym_journal_written_bytes_total": ("counter", set()),
    "rollgym_journal_damage_total": ("counter", set()),
    "rollgym_registrations": ("gauge", {"env_id", "protocol"}),
    "rollgym_healthy_replicas": ("gauge", {"env_id"}),
    "rollgym_registrations_ended_total": ("counter", {"env_id", "reason"}),
    "rollgym_upstream_seconds": ("histogram", {"op", "protocol"}),
    "rollgym_upstream_errors_total": ("counter", {"env_id", "protocol"}),
    "rollgym_failovers_total": ("counter", {"env_id"}),
    "rollgym_shared_journal_up": ("gauge", set()),
    "rollgym_shared_journal_waiting": ("gauge", set()),
    "rollgym_shared_journal_writes_total": ("counter", {"status"}),
    "rollgym_shared_journal_write_seconds": ("histogram", set()),
    "rollgym_shared_journal_calls_total": ("counter", {"command", "outcome"}),
    "rollgym_shared_journal_call_seconds": ("histogram", {"command"}),
    "rollgym_shared_journal_sent_bytes_total": ("counter", set()),
    "rollgym_shared_journal_damage_total": ("counter", set()),
}
"""What dashboards and alerts of others are written against: changing a line here breaks them."""


SERVER = (*ENVS, *INLINE, "--allow-expert", "--max-sessions-per-token", "3")
GATEWAY = ("--gateway", "--allow-network", "loopback", "--max-env-labels", "2", "--log-level", "error")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*SERVER) as running:
        yield running


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    with ServerProcess(GATEWAY) as running:
        yield running


@pytest.fixture
def new_server() -> Iterator[Server]:
    """A server that has counted nothing yet, whichever tests ran before."""
    with Server(*SERVER) as running:
        yield running


@pytest.fixture
def new_gateway() -> Iterator[ServerProcess]:
    """A gateway that has counted nothing yet, whichever tests ran before."""
    with ServerProcess(GATEWAY) as running:
        yield running


def families(text: str) -> dict[str, tuple[str, set[str]]]:
    """The metrics of ours in a text: type, and labels where there are samples."""
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("rollgym_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels if family.samples else None)
    return found


async def test_names_types_and_labels_are_these(new_server: Server, new_gateway: ServerProcess) -> None:
    async with new_server.http() as client, new_server.socket() as socket:
        made = await socket.make(kwargs={"length": 9})
        slow = await socket.make("SlowCount")
        await socket.call("step", session_id=slow, action="a")
        await socket.call("fork", session_id=made)
        await socket.call("reset", session_id=made, options={"expert": True})
        await socket.call("step", session_id=made, action="win")
        await socket.ask("make", env_id="Count", count=9)
        await client.post("/v1/verify/Equal", json={"items": [{"response": "4", "answer": "4"}]})
        await socket.call("close", session_ids=[made, slow])
        text = (await client.get("/metrics")).text
    async with httpx.AsyncClient(base_url=new_gateway.url) as client, asyncio.TaskGroup() as group:
        body = {"env_id": "Far", "url": new_server.url, "protocol": "rollgym", "upstream_env_id": "Count"}
        answer = await client.post("/v1/envs", json=body)
        assert answer.status_code == 201, answer.text
        made_there = (await client.post("/v1/sessions", json={"env_id": "Far"})).json()["session_id"]
        await client.delete(f"/v1/sessions/{made_there}")
        gateway_text = (await client.get("/metrics")).text
        group.create_task(client.delete(f"/v1/registrations/{answer.json()['registration_id']}"))
    one, other = families(text), families(gateway_text)
    assert one.keys() == other.keys() == NAMES.keys(), "NAMES, above, has a line for each"
    for name, (kind, labels) in NAMES.items():
        for found_kind, found_labels in (one[name], other[name]):
            assert found_kind == kind, name
            assert found_labels in (None, labels), name
    unseen = {name for name in NAMES if one[name][1] is None and other[name][1] is None}
    troubles = {"worker_restarts", "registrations_ended", "upstream_errors", "failovers", "event_loop_holds"}
    # Programs are counted by servers with a sandbox (test_run_code.py), and what gateways share by those that do
    # (test_shared_journal.py).
    shared = {name for name in NAMES if name.startswith("rollgym_shared_journal_")}
    assert unseen == {f"rollgym_{name}_total" for name in troubles | {"runs"}} | shared


def test_the_documentation_lists_them() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(rollgym_\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == NAMES


def test_whoever_names_a_metric_names_one_that_there_is() -> None:
    names = {metric.exported for metric in SERVER_METRICS}
    names |= {f"{metric.name}_bucket" for metric in SERVER_METRICS if metric.kind == "histogram"}
    named = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("console", "deploy", "docs")
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in (".yaml", ".json", ".js", ".md")
        for name in re.findall(r"\brollgym_[a-z_]+", path.read_text(encoding="utf-8"))
    }
    assert len({path for path, _ in named}) > 5
    assert {each for each in named if each[1] not in names} == set()


async def test_nobody_outside_chooses_labels(server: Server) -> None:
    hostile = ['x",env_id="y', "a\nb 1", "🦊" * 40, "../../etc", "Count\u0000", "other", "ok"]
    async with server.http() as client, server.socket() as socket:
        await socket.call("close", session_ids=[await socket.make()])
        for text in hostile:
            for op, fields in (
                ("make", {"env_id": text}),
                ("make", {"env_id": "Count", "kwargs": {text: text}}),
                ("verify", {"env_id": text, "items": [{"response": text}]}),
                ("step", {"session_id": text, "action": text}),
                ("reset", {"session_id": "0.1", text: text}),
                (text, {"session_id": text}),
                ("restore", {"episode": {"env_id": text}}),
                ("envs", {"env_id": text}),
            ):
                assert "error" in await socket.ask(op, **fields)
            assert (await socket.batch({"op": text, "session_id": text}))[0]["error"]["code"] == "unknown_op"
            await client.post("/v1/sessions", json={"env_id": text})
            await client.request("GET", "/v1/envs/%22%7Dx", headers={"x-request-id": "abc"})
        samples = await scrape(server.url)
    ops = {"make", "verify", "step", "reset", "restore", "envs", "fork", "close", "session", "ping", "info"}
    allowed = {
        "env_id": {"Count", "SlowCount", "Chance", "Arrays", "Equal"} | set(await builtin(server)),
        "op": ops | {"episode", "sessions", "render", "reseed", "cancel"},
    }
    seen: dict[str, set[str]] = {}
    for _, labels in samples:
        for label, text in labels:
            seen.setdefault(label, set()).add(text)
    for label, values in allowed.items():
        assert seen[label] <= values
    assert all(re.fullmatch(r"[a-z_]+", code) for code in seen["code"])


async def builtin(server: Server) -> list[str]:
    async with server.http() as client:
        return [env["env_id"] for env in (await client.get("/v1/envs")).json()["envs"]]


async def test_episodes_by_how_they_ended(server: Server) -> None:
    before = await scrape(server.url)
    async with server.socket() as socket:
        for env_id in ("Count", "SlowCount"):
            made = await socket.make(env_id, kwargs={"length": 2})
            for actions in (["a", "a"], ["win"], ["cut"], ["raise"], ["a"]):
                await socket.call("reset", session_id=made)
                for action in actions:
                    await socket.ask("step", session_id=made, action=action)
            await socket.call("close", session_id=made)
    after = await scrape(server.url)
    for env_id in ("Count", "SlowCount"):
        ended = {
            outcome: value(after, "rollgym_episodes_total", labels)
            - value(before, "rollgym_episodes_total", labels)
            for outcome in ("success", "terminated", "truncated", "error", "abandoned")
            if (labels := {"env_id": env_id, "outcome": outcome})
        }
        # Two are left: the one that came with the session, and the last one.
        assert ended == {"success": 1, "terminated": 1, "truncated": 1, "error": 1, "abandoned": 2}


async def test_times_and_bytes_are_counted(server: Server) -> None:
    before = await scrape(server.url)
    async with server.http() as client, server.socket() as socket:
        slow, fast = await socket.make("SlowCount"), await socket.make(kwargs={"length": 100})
        asked = [await socket.send("step", session_id=slow, action="sleep 0.2")]
        asked += [await socket.send("step", session_id=fast, action="é" * 1000) for _ in range(32)]
        for number in asked:
            assert "ok" in await socket.answer(number)
        await client.post("/v1/verify/Equal", json={"items": [{"response": "x" * 5000, "answer": "4"}]})
        await socket.call("close", session_ids=[slow, fast])
    after = await scrape(server.url)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, labels) - value(before, name, labels)

    where = {"op": "step", "isolation": "process"}
    assert grown("rollgym_environment_seconds_count", **where) == 1
    assert grown("rollgym_environment_seconds_sum", **where) >= 0.2
    assert grown("rollgym_environment_seconds_bucket", le="0.1", **where) == 0
    assert grown("rollgym_queue_seconds_count", **where) == 1
    assert grown("rollgym_environment_seconds_count", op="step", isolation="inline") == 32
    assert grown("rollgym_operation_seconds_sum", op="step") >= 0.2
    assert grown("rollgym_operations_total", op="step", code="ok") == 33
    assert grown("rollgym_received_bytes_total", transport="websocket") > 32 * 2000
    assert grown("rollgym_sent_bytes_total", transport="websocket") > 32 * 2000
    assert grown("rollgym_received_bytes_total", transport="http") > 5000
    assert grown("rollgym_sent_bytes_total", transport="http") > 0
    assert grown("rollgym_sockets_opened_total") == 1


async def test_refusals_by_reason() -> None:
    limits = ("--max-sessions", "1", "--rate-limit", "20", "--isolation", "SlowCount=inline")
    with Server(*ENVS, *INLINE, *limits) as server:
        async with server.socket() as socket:
            await socket.make()
            await socket.ask("make", env_id="Count")
            asked = [await socket.send("ping") for _ in range(60)]
            refused = sum(["error" in await socket.answer(number) for number in asked])
        samples = await scrape(server.url)
    assert refused > 0
    assert value(samples, "rollgym_refusals_total", {"reason": "max_sessions"}) == 1
    assert value(samples, "rollgym_refusals_total", {"reason": "rate_limited"}) == refused
    assert value(samples, "rollgym_operations_total", {"op": "ping", "code": "rate_limited"}) == refused
    assert value(samples, "rollgym_operations_total", {"op": "make", "code": "at_capacity"}) == 1


async def test_a_worker_that_dies_and_the_replay_after_it(tmp_path: Path) -> None:
    with Server(*ENVS, *INLINE, "--workers", "1", "--state-dir", str(tmp_path)) as server:
        async with server.socket() as socket:
            made = await socket.make("SlowCount")
            assert (await socket.call("step", session_id=made, action="a"))["step"] == 1
            for pid in children(server.process.pid):
                os.kill(pid, signal.SIGKILL)
            assert (await socket.call("step", session_id=made, action="b"))["step"] == 2
            samples = await scrape(server.url)
    assert value(samples, "rollgym_worker_restarts_total", {"reason": "died"}) == 1
    assert value(samples, "rollgym_rebuilds_total", {"env_id": "SlowCount", "outcome": "ok"}) == 1
    assert value(samples, "rollgym_worker_processes") == 1
    assert value(samples, "rollgym_worker_memory_bytes") > 1e6
    assert value(samples, "rollgym_journal_bytes") > 0
    written = value(samples, "rollgym_journal_written_bytes_total")
    assert written >= value(samples, "rollgym_journal_bytes")


def children(pid: int) -> list[int]:
    """The worker processes of a server."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_figures_of_several_processes_are_added_up() -> None:
    with Server(*ENVS, *INLINE, "--processes", "2", "--workers", "1") as server:
        async with server.socket() as socket:
            # Over one socket: what the other process owns is passed on, and must count once.
            owners: dict[str, str] = {}
            while len(owners) < 2:
                async with server.socket() as another:
                    made = await another.make(kwargs={"length": 100})
                    owners[made.partition(".")[0]] = made
                    for _ in range(3):
                        for session_id in owners.values():
                            await socket.call("session", session_id=session_id)
            before = await scrape(server.url)
            for session_id in owners.values():
                for _ in range(16):
                    await socket.call("step", session_id=session_id, action="a")
            after = await scrape(server.url)
    steps = {"op": "step", "code": "ok"}
    assert change(before, after, "rollgym_operations_total", steps) == 32
    assert change(before, after, "rollgym_steps_total", {"env_id": "Count"}) == 32
    assert value(after, "rollgym_sessions", {"env_id": "Count"}) >= 2
    assert value(after, "rollgym_processes") == 2
    assert value(after, "rollgym_ready") == 1
    assert value(after, "rollgym_max_sessions") == 4096
    assert change(before, after, "rollgym_event_loop_lag_seconds_count", {}) >= 0
    assert value(after, "rollgym_worker_processes") == 2


def change(before: Samples, after: Samples, name: str, labels: dict[str, str]) -> float:
    return value(after, name, labels) - value(before, name, labels)


async def test_a_gateway_counts_its_servers(server: Server, gateway: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:

        async def register(env_id: str, url: str = server.url, **more: Any) -> str:
            body = {"env_id": env_id, "url": url, "protocol": "rollgym", "upstream_env_id": "Count", **more}
            answer = await client.post("/v1/envs", json=body)
            assert answer.status_code == 201, answer.text
            return answer.json()["registration_id"]

        with Server(*ENVS, *INLINE) as second:
            kept = await register("One")
            await register("One", second.url)
            samples = await scrape(gateway.url)
            assert value(samples, "rollgym_registrations", {"env_id": "One", "protocol": "rollgym"}) == 2
            assert value(samples, "rollgym_healthy_replicas", {"env_id": "One"}) == 2
            made = [
                (await client.post("/v1/sessions", json={"env_id": "One", "reset": {"seed": 1}})).json()
                for _ in range(2)
            ]
        # The second server is gone: its session is rebuilt on the first.
        for each in made:
            url = f"/v1/sessions/{each['session_id']}/step"
            answer = await client.post(url, json={"action": "a"})
            assert answer.json().get("step") == 1, answer.text
        samples = await scrape(gateway.url)
        assert value(samples, "rollgym_failovers_total", {"env_id": "One"}) == 1
        assert value(samples, "rollgym_rebuilds_total", {"env_id": "One", "outcome": "ok"}) == 1
        assert value(samples, "rollgym_upstream_errors_total", {"env_id": "One", "protocol": "rollgym"}) >= 1
        assert value(samples, "rollgym_upstream_seconds_count", {"op": "step", "protocol": "rollgym"}) >= 2
        for each in made:
            await client.delete(f"/v1/sessions/{each['session_id']}")
        await client.delete(f"/v1/registrations/{kept}")
        for name in ("Two", "Three", "Four"):
            await register(name, ttl_s=1.0)
        samples = await scrape(gateway.url)
        labels = {dict(found)["env_id"] for name, found in samples if name == "rollgym_registrations"}
        assert len(labels) <= 3
        assert "other" in labels
        # No heartbeat comes.
        async with asyncio.timeout(20):
            ended = {"env_id": "other", "reason": "expired"}
            while value(samples, "rollgym_registrations_ended_total", ended) < 2:
                await asyncio.sleep(0.1)
                samples = await scrape(gateway.url)
        assert value(samples, "rollgym_registrations_ended_total", {"env_id": "One", "reason": "left"}) == 1
        assert samples["rollgym_healthy_replicas", (("env_id", "One"),)] == 0


@pytest.mark.parametrize("limit", [["max_sessions"], {}, None])
def test_a_limit_that_a_node_names_is_counted_only_where_it_is_a_text(limit: Any) -> None:
    metrics = Metrics(EnvironmentLabels(1))
    metrics.operation_failed("make", ProblemError("at_capacity", "it is full", limit=limit))
    assert not metrics.refusals
