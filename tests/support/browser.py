"""A real browser: Debian's Chromium, without a window."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_REMEDY = "install it (Debian: apt-get install chromium), or name its program in the variable CHROMIUM"


def chromium() -> str:
    """The program of the browser; without one a test is skipped, or fails where the variable `CI` is set."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"there is no Chromium here: {_REMEDY}")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser. The loop it runs on lets no other run in this thread, so no test with a loop may come between."""
    program = chromium()
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs a kernel feature that containers mostly lack, and the pages are ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Witness:
    """Notes what a page does that it should not.

    Attributes:
        complaints: Errors and warnings of its scripts and of its policy.
        requested: The addresses that it has asked for.
    """

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        # A machine that gains or loses a network (a container's, say) breaks what its browsers are asking for.
        if message.type in ("error", "warning") and "ERR_NETWORK_CHANGED" not in message.text:
            self.complaints.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()
