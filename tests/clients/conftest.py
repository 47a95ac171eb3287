from collections.abc import Iterator

import pytest

from tests.support.client_server import ENVS, ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with ServerProcess([*ENVS, "--gymnasium", "CartPole-v1", "--linger-s", "2"]) as running:
        yield running
