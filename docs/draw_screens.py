"""Takes the pictures of the console and of a run's page that the documentation shows.

    roll-train --config examples/frozen_lake.yaml steps=40 output_dir=runs/pictures
    python docs/draw_screens.py runs/pictures

A real browser (Debian's Chromium, without a window) plays on a real server by buttons and keys, and opens the report of
the run. So every picture shows what a reader gets.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images"
LARGEST_BYTES = 150_000
_SIZE = {"width": 1100, "height": 760}
_COLOURS = 128
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def play_a_game(page: Page, _run: Path) -> Page:
    """FrozenLake in the console, three moves from the start."""
    page.goto("/console#/play/FrozenLake-v0")
    page.get_by_label("Seed").fill("4")
    page.get_by_role("button", name="Start the episode").press("Enter")
    for key in ("Down", "Down", "Right"):
        page.get_by_role("button", name=key, exact=True).press(f"Arrow{key}")
    page.get_by_role("row", name="2 Right").wait_for()
    return page


def call_a_tool(page: Page, _run: Path) -> Page:
    """A tool of Retail-v0 that was called by its form in the console."""
    page.goto("/console#/play/Retail-v0")
    page.get_by_label("Seed").fill("4")
    page.get_by_role("button", name="Start the episode").press("Enter")
    page.get_by_label("Tool", exact=True).select_option("get_order")
    page.get_by_label("order_id", exact=True).fill("#W6694760")
    page.get_by_role("button", name="Call", exact=True).press("Enter")
    page.get_by_role("row", name="0 ").wait_for()
    page.get_by_role("region", name="Observation").evaluate("shown => shown.scrollIntoView()")
    return page


def look_at_a_run(page: Page, run: Path) -> Page:
    """The episodes of a run in the console's replay page."""
    page.goto("/console#/replay")
    page.get_by_label("Episode file").set_input_files(run / "episodes.jsonl")
    page.get_by_role("row").nth(1).wait_for()
    return page


def open_the_report(page: Page, run: Path) -> Page:
    """The top of a run's page."""
    page.goto((run / "report.html").as_uri())
    return page


def open_an_episode(page: Page, run: Path) -> Page:
    """A solved episode of a run's page: its turns, and the tokens of the first ones."""
    page.goto((run / "report.html").as_uri())
    page.get_by_label("Sort by").select_option("-step")
    page.get_by_label("Outcome").select_option("solved")
    page.locator(".episode:not([hidden]) > summary").first.click()
    page.get_by_label("Sort by").evaluate("shown => shown.scrollIntoView()")
    return page


SCREENS: Mapping[str, Callable[[Page, Path], Page]] = {
    "console": play_a_game,
    "console_tools": call_a_tool,
    "console_run": look_at_a_run,
    "report": open_the_report,
    "report_episode": open_an_episode,
}


@contextmanager
def served() -> Iterator[str]:
    """A server of the built-in environments on a free port; gives its URL, and ends it."""
    command = [sys.executable, "-m", "rollgym.env_server", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if "serving on" in line:
                    yield next(word for word in line.split() if word.startswith("http://"))
                    return
            raise SystemExit("the server has not started")
        finally:
            server.terminate()


def compressed(picture: bytes) -> bytes:
    """The same picture as a PNG of few colours: pages have few, and the file is a third."""
    written = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(_COLOURS).save(written, "PNG", optimize=True)
    return written.getvalue()


def browser_program() -> str:
    """The program of the browser."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise SystemExit("there is no Chromium: apt-get install chromium, or name its program in CHROMIUM")
    return found


def main() -> None:
    """Take all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory of a run of FrozenLake")
    parser.add_argument("--only", choices=SCREENS, nargs="+", default=list(SCREENS), help="default: all")
    parser.add_argument("--output", type=Path, default=PICTURES, help="default: docs/images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "frozen_lake"
        shutil.copytree(options.run, run, ignore=shutil.ignore_patterns("checkpoints"))
        # By a relative path, which the page shows.
        report = [sys.executable, "-m", "rollgym.trainer.cli", "report", "runs/frozen_lake"]
        subprocess.run(report, check=True, cwd=folder)
        with served() as url, sync_playwright() as playwright:
            # Chromium's own sandbox needs a kernel feature that containers mostly lack, and the pages are ours.
            browser = playwright.chromium.launch(executable_path=browser_program(), args=["--no-sandbox"])
            for name in options.only:
                page = browser.new_page(base_url=url, viewport=_SIZE, color_scheme="light")
                picture = compressed(SCREENS[name](page, run).screenshot())
                if len(picture) > LARGEST_BYTES:
                    raise SystemExit(
                        f"{name} has {len(picture)} bytes: show less of the page, or fewer colours"
                    )
                (options.output / f"{name}.png").write_bytes(picture)
                print(f"{options.output / name}.png: {len(picture)} bytes")
                page.close()
            browser.close()


if __name__ == "__main__":
    main()
