"""One browser and one server for the tests of the console.

The folder is a package, since pytest keeps a fixture of the scope `package` for the whole session elsewhere, where the
loop of the browser would be in the way of tests with loops of their own.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import Witness, running_browser
from tests.support.wire import ENVS, INLINE, Server


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="package")
def served() -> Iterator[Server]:
    with Server(
        *ENVS,
        *INLINE,
        *("--env", "Hostile=tests.support.hostile_env:Hostile", "--isolation", "Hostile=inline"),
        *("--env", "tests.support.served_envs:Undrawable", "--isolation", "Undrawable=inline"),
        *("--env", "tests.support.served_envs:Undeclared", "--isolation", "Undeclared=inline"),
        *("--gymnasium", "CartPole-v1", "--isolation", "CartPole-v1=inline"),
    ) as running:
        yield running


@pytest.fixture
def expected_complaints() -> list[str]:
    """Parts of what the browser complains of by right, to be added by a test."""
    return []


@pytest.fixture
def page(browser: Browser, served: Server, expected_complaints: list[str]) -> Iterator[Page]:
    """A page whose scripts must not complain."""
    with browser.new_context(base_url=served.url) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        witness = Witness(page)
        yield page
        unexpected = [
            each for each in witness.complaints if not any(part in each for part in expected_complaints)
        ]
        assert unexpected == []
        assert [url for url in witness.requested if not url.startswith((served.url, "blob:", "data:"))] == []
