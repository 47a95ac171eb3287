import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fragile_envs import Beacon
from tests.support.wire import ENVS, INLINE, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with Server(
        *ENVS,
        *INLINE,
        *("--gymnasium", "CartPole-v1", "--isolation", "CartPole-v1=inline"),
        *("--env-step-timeout-s", "SlowCount=5", "--operator-kwargs", 'Count={"data_dir": "/srv/data"}'),
    ) as running:
        yield running
        assert "failed inside the server" not in running.log()


@pytest.fixture
def beacon(tmp_path: Path) -> Iterator[Beacon]:
    """Where fragile environments say which process they are in."""
    made = Beacon(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _log_of_the_tests() -> Iterator[None]:
    """A command that is called in this process sends its log to an error stream that is gone after the test."""
    yield
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(logging.WARNING)
