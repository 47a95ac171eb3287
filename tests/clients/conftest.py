import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from rollgym.clients.process import local_server
from tests.support.client_server import ENVS, ServerProcess
from tests.support.garbling_server import GarblingServer
from tests.support.preloaded import SERVE, can_be_forked, fork
from tests.support.processes import ROOT


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


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that a command starts in this process are forked, where that makes no difference to them.

    They import all that they need for a second of CPU time otherwise, and most tests of commands start one.
    """

    def start(command: list[str], *, stderr: IO[bytes], env: dict[str, str], **streams: Any) -> Any:
        words = command[command.index("-m") + 2 :]
        if Path.cwd() == ROOT and can_be_forked(SERVE, env):
            return fork(SERVE, words, env, stderr=stderr.fileno())
        return subprocess.Popen(command, stderr=stderr, env=env, **streams)

    monkeypatch.setattr(local_server, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
