from collections.abc import Iterator

import pytest

from tests.support.client_server import ENVS, ServerProcess
from tests.support.garbling_server import GarblingServer


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with ServerProcess([*ENVS, "--gymnasium", "CartPole-v1", "--linger-s", "2"]) as running:
        yield running


@pytest.fixture(scope="module")
def garbling_server() -> Iterator[GarblingServer]:
    with GarblingServer() as server:
        yield server


@pytest.fixture
def garbling(garbling_server: GarblingServer) -> Iterator[GarblingServer]:
    """A server that answers well until a test tells it otherwise."""
    yield garbling_server
    garbling_server.answers.clear()
