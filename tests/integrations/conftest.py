from collections.abc import Iterator

import pytest

from tests.support.client_server import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server for all libraries; it has the built-in environments, some that fail, and one of arrays."""
    arguments = ["--gymnasium", "CartPole-v1"]
    for name in ("Fragile", "Random"):
        arguments += ["--env", f"{name}-v0=tests.support.fragile_envs:{name}"]
    with ServerProcess(arguments) as running:
        yield running
