"""What is said of an environment server that is gone."""

import asyncio

import pytest

from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.rollout.outages import OutageReport
from tests.support.clock import clock, on_a_clock

ADDRESS = "http://127.0.0.1:65535"
ERROR = f"no server answers at {ADDRESS}: [Errno 111] Connect call failed ('127.0.0.1', 65535)"


def test_what_is_said_of_a_server_that_is_gone_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = RunConsole(10, live=False)

    async def outage() -> None:
        report = OutageReport(console, 300.0)
        hear = report.listener(ADDRESS, lambda: 1024)
        hear(ConnectionError(ERROR))
        await asyncio.sleep(0)
        for _ in range(40):
            await clock().forward(1.0)
        hear(None)
        report.close()

    on_a_clock(outage(), frozen=True)
    output = capsys.readouterr().out
    assert f"{ADDRESS} has not answered for 15 s, 1024 episodes wait\n" in output
    assert "the run is saved and ends after 300 s" in output
    assert max(map(len, output.splitlines())) <= 80
