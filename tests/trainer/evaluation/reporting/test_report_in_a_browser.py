"""The page of a run in a real browser: it follows the run, runs nothing of what episodes say, and ends in time."""

import json
import signal
import subprocess
import sys

import pytest

from tests.support.browser import Witness, running_browser
from tests.support.processes import ROOT, running
from tests.trainer.evaluation.reporting.test_report import HOSTILE, metrics, write_run


@pytest.fixture(scope="module")
def browser():
    with running_browser() as opened:
        yield opened


def test_the_page_follows_the_run_and_runs_nothing_of_it(tmp_path, browser):
    run = write_run(tmp_path / "run", text=HOSTILE, name="a lake " + HOSTILE)
    command = [sys.executable, "-m", "rollgym.trainer.cli", "report", str(run), "--serve"]
    with running(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
        page = browser.new_page(color_scheme="dark", viewport={"width": 390, "height": 800})
        witness = Witness(page)
        page.goto(url)
        assert "<img" in page.locator("h1").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_text("As the run resolved them").click()
        page.get_by_role("button", name="probability").click()
        assert page.evaluate("document.documentElement.dataset.colour") == "probability"
        page.locator("svg[data-chart]").first.hover()
        assert "step" in page.locator("#tip").inner_text()

        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(7)) + "\n")
        page.locator(".card", has_text="of 6").get_by_text("7", exact=True).wait_for(timeout=30_000)
        assert page.locator("#all-settings").get_attribute("open") is not None, "what is open stays open"
        assert witness.complaints == []
        assert all(address.startswith(url) for address in witness.requested)

        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130), "an open page does not keep the server"
        page.close()
