"""Traces: a span for each operation, in the trace of whoever called, through a gateway and between processes."""

import asyncio
import socket as socket_module
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.otlp_collector import Collector, Sent
from tests.support.processes import ROOT
from tests.support.wire import ENVS, INLINE, Server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def by_name(spans: list[Sent]) -> dict[str, Sent]:
    return {span.name: span for span in spans}


async def test_each_operation_is_a_span_of_the_callers_trace(collector: Collector) -> None:
    with Server(*ENVS, *INLINE, "--trace-endpoint", collector.endpoint) as server:
        header = {"traceparent": TRACEPARENT}
        async with server.socket(additional_headers=header) as socket, server.http() as client:
            made = await socket.make("SlowCount")
            await socket.call("step", session_id=made, action="a")
            other = f"00-{'1' * 32}-{'2' * 16}-01"
            await socket.ask("step", session_id=made, action="raise", traceparent=other)
            await socket.batch({"op": "reset", "session_id": made, "traceparent": other})
            await client.post("/v1/verify/Equal", json={"items": [{"response": "4"}]}, headers=header)
            await socket.call("ping")
        assert server.stop() == 0
    spans = collector.spans
    assert sorted(span.name for span in spans) == ["make", "reset", "step", "step", "verify"]
    failed = next(span for span in spans if span.failed)
    assert (failed.name, failed.trace_id, failed.parent_id) == ("step", "1" * 32, "2" * 16)
    assert failed.attributes["rollgym.code"] == "env_error"
    good = by_name([span for span in spans if not span.failed])
    assert good["reset"].trace_id == "1" * 32
    assert {(good[op].trace_id, good[op].parent_id) for op in ("make", "step", "verify")} == {(TRACE, PARENT)}
    assert good["step"].attributes == {
        "rollgym.session_id": made,
        "rollgym.env_id": "SlowCount",
        "rollgym.episode": 0,
        "rollgym.step": 1,
        "rollgym.terminated": False,
        "rollgym.truncated": False,
        "rollgym.code": "ok",
    }
    assert good["make"].attributes["rollgym.session_id"] == made
    assert good["verify"].attributes["rollgym.env_id"] == "Equal"


@pytest.mark.slow
async def test_a_gateways_nodes_go_on_with_the_trace(collector: Collector) -> None:
    tracing = ("--trace-endpoint", collector.endpoint)
    with Server("--gateway", "--allow-network", "loopback", *tracing) as gateway:
        with Server(*ENVS, *INLINE, *tracing, "--register", gateway.url) as node:
            async with gateway.http() as client, asyncio.timeout(60):
                while not (await client.get("/v1/envs/Count")).is_success:
                    await asyncio.sleep(0.1)
            async with gateway.socket() as socket:
                made = await socket.make(traceparent=TRACEPARENT)
                await socket.call("step", session_id=made, action="a", traceparent=TRACEPARENT)
                await socket.call("step", session_id=made, action="b")
            node.stop()
        gateway.stop()
    ours = [span for span in collector.spans if span.trace_id == TRACE]
    entered = next(span for span in ours if (span.name, span.parent_id) == ("step", PARENT))
    there = next(span for span in ours if span.name == "step" and span.parent_id == entered.span_id)
    assert (there.attributes["rollgym.env_id"], there.attributes["rollgym.step"]) == ("Count", 1)
    assert there.attributes["rollgym.session_id"] != made
    # A call without a trace begins one, and takes the node along, too.
    steps = [span for span in collector.spans if span.name == "step"]
    (root,) = (span for span in steps if not span.parent_id and span.attributes["rollgym.session_id"] == made)
    assert [span.trace_id for span in steps if span.parent_id == root.span_id] == [root.trace_id]


@pytest.mark.slow
async def test_what_another_process_owns_is_one_trace(collector: Collector) -> None:
    with Server(*ENVS, *INLINE, "--processes", "2", "--trace-endpoint", collector.endpoint) as server:
        async with server.socket() as one:
            made = await one.make()
            owner = int(made.partition(".")[0])
            async with asyncio.timeout(60):
                while True:
                    async with server.socket() as other:
                        if (await other.call("info"))["process"] != owner:
                            await other.call("step", session_id=made, action="a", traceparent=TRACEPARENT)
                            break
        server.stop()
    steps = {span.process: span for span in collector.spans if span.name == "step"}
    assert steps.keys() == {0, 1}
    assert {span.trace_id for span in steps.values()} == {TRACE}
    assert steps[1 - owner].parent_id == PARENT
    assert steps[owner].parent_id == steps[1 - owner].span_id


async def test_of_traces_that_begin_here_a_share_is_kept(collector: Collector) -> None:
    arguments = ("--trace-endpoint", collector.endpoint, "--trace-ratio", "0")
    with Server(*ENVS, *INLINE, *arguments) as server:
        async with server.socket() as socket:
            made = await socket.make()
            await socket.call("step", session_id=made, action="a")
            await socket.call("step", session_id=made, action="b", traceparent=TRACEPARENT)
            await socket.call("session", session_id=made, traceparent="00-not-a-trace")
        server.stop()
    assert [(span.name, span.trace_id) for span in collector.spans] == [("step", TRACE)]


async def test_a_collector_that_is_away_costs_nothing_but_spans() -> None:
    with Server(*ENVS, *INLINE, "--trace-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        async with server.socket() as socket:
            made = await socket.make()
            assert (await socket.call("step", session_id=made, action="a"))["step"] == 1
        assert server.stop() == 0


async def test_a_collector_that_hangs_does_not_keep_the_server_from_ending() -> None:
    with socket_module.create_server(("127.0.0.1", 0)) as hanging:
        endpoint = f"http://127.0.0.1:{hanging.getsockname()[1]}/v1/traces"
        with Server(*ENVS, *INLINE, "--trace-endpoint", endpoint) as server:
            async with server.socket() as socket:
                await socket.make()
            server.process.terminate()
            # OpenTelemetry itself waits for half a minute.
            assert await asyncio.to_thread(server.process.wait, 20) == 0


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    """FastAPI imports the interface, which does nothing without an SDK."""
    code = (
        "import rollgym.env_server.cli, sys; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
