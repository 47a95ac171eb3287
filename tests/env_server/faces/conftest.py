from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.auth import add_token
from tests.support.wire import ENVS, INLINE, Server


@pytest.fixture(scope="package")
def plain() -> Iterator[Server]:
    """A server with the test environments, for tests that leave it as it was."""
    with Server(*ENVS, *INLINE, "--env-step-timeout-s", "SlowCount=20", "--processes", "2") as running:
        yield running
        assert "failed inside the server" not in running.log()


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server with tokens, and few places."""
    file: Path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens = {name: add_token(file, name, ["play"]) for name in ("alice", "bob")}
    tokens["node"] = add_token(file, "node", ["register"])
    arguments = ("--token-file", str(file), "--max-sessions", "2", "--idle-timeout-s", "2")
    with Server(*ENVS, *INLINE, *arguments) as running:
        yield running, tokens
        assert "failed inside the server" not in running.log()
