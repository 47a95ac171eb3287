"""The page of a run in a real browser: it follows the run, runs nothing of what episodes say, and ends in time."""

import json
import signal
import subprocess
import sys

import pytest

from tests.support.browser import Witness, running_browser
from tests.support.processes import ROOT, running
from tests.support.report_runs import HOSTILE, episode, metrics, page_of, write_run


@pytest.fixture(scope="module")
def browser():
    with running_browser() as opened:
        yield opened


def titles(page):
    """The episodes' lines that a reader sees, from the top."""
    return page.locator(".episode:not([hidden]) > summary b").all_inner_texts()


def test_episodes_are_sorted_and_filtered_from_disk_by_keyboard(tmp_path, browser):
    run = write_run(tmp_path / ("run_" * 30), steps=3)
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    lines[2]["outcome"] = "failed"
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "report.html").write_text(page_of(run), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    witness = Witness(page)
    page.goto((run / "report.html").as_uri())
    assert [title.split(":")[0] for title in titles(page)] == [f"step {step}" for step in (1, 1, 2, 2, 3, 3)]

    page.get_by_label("Sort by").focus()
    page.keyboard.press("ArrowDown")
    assert [title.split(":")[0] for title in titles(page)] == [f"step {step}" for step in (3, 3, 2, 2, 1, 1)]
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert len(titles(page)) == 1
    assert page.locator("#shown").inner_text() == "1 of 6 shown"
    page.get_by_label("Outcome").select_option("all")
    page.get_by_label("Containing").press_sequentially("board right")
    assert len(titles(page)) == 6
    page.get_by_label("Containing").press_sequentially(" nowhere")
    assert titles(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert witness.complaints == []
    page.close()


def test_what_a_reader_opened_and_chose_outlives_another_sample(tmp_path, browser):
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "rollgym.trainer.cli", "report", str(run), "--serve"]
    with running(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
        page = browser.new_page()
        page.goto(url)
        page.locator("#e3-7-1 > summary").click()
        page.get_by_label("Sort by").select_option("-step")
        # The run has gone so far that the sample has other episodes.
        (run / "episodes.jsonl").write_text(
            "".join(json.dumps(episode(step, step * 2)) + "\n" for step in range(100, 110))
        )
        page.locator("#e109-218-1").wait_for(timeout=30_000)
        assert page.locator("#e3-7-1").get_attribute("open") is not None
        assert page.locator(".episode[open]").count() == 1
        assert titles(page)[0].startswith("step 110")
        assert titles(page)[-1].startswith("step 4")
        page.close()


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
