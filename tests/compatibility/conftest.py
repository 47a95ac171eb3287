from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peer_packages import NoPythonError, peer_python
from tests.support.wire import Server


@pytest.fixture(scope="session")
def openenv() -> Path:
    """The interpreter with OpenEnv's packages."""
    return peer_python("openenv")


@pytest.fixture(scope="session")
def rock() -> Path:
    """The interpreter with ROCK's and GEM's packages."""
    try:
        return peer_python("rock")
    except NoPythonError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of ours with two I/O processes."""
    with Server("--processes", "2", "--allow-expert", "--gymnasium", "CartPole-v1") as running:
        yield running


@pytest.fixture(scope="session")
def gateway() -> Iterator[Server]:
    with Server("--gateway", "--allow-network", "loopback") as running:
        yield running
