"""The messages that the page quotes are those that are raised, and most of them are raised here."""

import ast
import functools
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.process.server import reserve
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.selection import open_sandbox
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.config.inference import vllm_lora_rank
from rollgym.trainer.config.load import settings_from
from rollgym.trainer.core.errors import TrainerError
from rollgym.trainer.core.run_files import run_lock, write_errors
from rollgym.trainer.run.resume import keep_settings
from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "when_it_goes_wrong.md").read_text()
QUOTED = [*re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE), *re.findall(r"`(this token has [^`]+)`", PAGE)]
TASKS = {"tasks": [{"env_id": "FrozenLake-v0"}]}


def form_of(message: str) -> re.Pattern[str]:
    """What a message looks like, whose dots stand for anything."""
    message = message.removesuffix(": No space left on device")  # the system's words
    return re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)


@functools.cache
def texts() -> list[str]:
    """All texts in the sources, with dots for what is filled in."""
    found = []
    for package in ("clients", "env_server", "envs", "sandbox", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_stands_in_the_code(message: str) -> None:
    form = form_of(message)
    assert any(form.search(text) for text in texts()), message


def test_there_are_enough_and_a_wrong_one_would_be_found() -> None:
    assert len(QUOTED) >= 25
    assert not any(form_of("no server replies at ...").search(text) for text in texts())


def is_on_the_page(said: BaseException | str, beginning: str) -> None:
    """A message that was raised is quoted under one heading, which begins so."""
    (quoted,) = [message for message in QUOTED if message.startswith(beginning)]
    assert form_of(quoted).search(str(said)), (quoted, said)


# -- what is raised ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with room for one session, which ends soon where nobody uses it."""
    with ServerProcess(["--max-sessions", "1", "--idle-timeout-s", "1"]) as running:
        yield running


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError) as raised:
        RemoteEnv(f"http://127.0.0.1:{port}", "FrozenLake-v0", connect_timeout_s=0.2)
    is_on_the_page(raised.value, "no server answers")


def test_no_environment(server: ServerProcess) -> None:
    with pytest.raises(ProblemError) as raised:
        RemoteEnv(server.url, "FrozenLake-v9")
    is_on_the_page(raised.value, "there is no environment")


def test_no_room_and_a_session_that_nobody_used(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as client:
        made = client.post("/v1/sessions", json={"env_id": "FrozenLake-v0", "reset": {}})
        refused = client.post("/v1/sessions", json={"env_id": "FrozenLake-v0"})
        assert refused.status_code == 503
        is_on_the_page(refused.json()["detail"], "the server has its")
        gone = client.get(f"/v1/sessions/{made.json()['session_id']}")
        while gone.status_code == 200:  # to look at one is not to use it
            time.sleep(0.05)
            gone = client.get(f"/v1/sessions/{made.json()['session_id']}")
    is_on_the_page(gone.json()["detail"], "session ... is gone")
    assert gone.json()["detail"].endswith("evicted")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError) as raised:
        reserve("127.0.0.1", taken.getsockname()[1], shared=False)
    is_on_the_page(raised.value, "cannot listen on")


def test_no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(SandboxUnavailableError) as raised:
        open_sandbox("docker:image")
    is_on_the_page(raised.value, "no Docker Engine")


def test_a_rank_that_is_too_large() -> None:
    with pytest.raises(TrainerError) as raised:
        vllm_lora_rank(513)
    is_on_the_page(raised.value, "model.lora.rank")


def test_a_run_whose_settings_have_changed(tmp_path: Path) -> None:
    keep_settings(settings_from(TASKS | {"seed": 1}), tmp_path, resuming=False)
    with pytest.raises(TrainerError) as raised:
        keep_settings(settings_from(TASKS | {"seed": 2}), tmp_path, resuming=True)
    is_on_the_page(raised.value, "cannot resume")


def test_a_folder_that_another_run_writes_to(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(TrainerError) as raised, run_lock(tmp_path):
        pass
    is_on_the_page(raised.value, "... is in use by")


def test_a_disk_that_is_full() -> None:
    full = Path("/dev/full")
    with pytest.raises(TrainerError) as raised, write_errors(full):
        full.write_text("x")
    is_on_the_page(raised.value, "cannot write")
    assert "No space left on device" in str(raised.value)


def test_steps_that_would_have_destroyed_the_weights() -> None:
    skipped = SkippedSteps("policy", limit=1)
    skipped.note(applied=False)
    with pytest.raises(TrainerError) as raised:
        skipped.note(applied=False)
    is_on_the_page(raised.value, "... optimizer steps")
