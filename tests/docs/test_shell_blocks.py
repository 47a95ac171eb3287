"""What the pages tell to type is typed, command by command, and every command does what it is told to."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollgym.env_server.access.tokens import add_token
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.selection import open_sandbox
from tests.support import redis_server, shell_blocks
from tests.support.client_server import ServerProcess
from tests.support.readers_folder import make_readers_folder
from tests.support.sandboxes import working_sandbox
from tests.support.shell_blocks import Terminal, not_to_be_run
from tests.support.snippets import SHELLS, Fence, fences_of, pages

# Pages whose blocks are typed with every change; the others start many servers, and are among the slow tests.
OFTEN = frozenset({"docs/console.md", "docs/protocol.md", "docs/roll_env.md"})
ANSWERS = {
    "--policy human": "9\n8\n7\n6\n5\n4\n3\n2\n1\n0\n" * 40,
    "roll-env play": "<answer>1</answer>\n:info\n",
}
# What a reader has typed before, by a word of the block that tells of it.
BEFORE = {
    "$SERVER": ["roll-serve --token-file tokens.yaml"],
    "REGISTRATION_ID": [
        "roll-serve --gateway --allow-network loopback",
        "python examples/http_environment.py 9000",
        "roll-env register Guess http://127.0.0.1:9000 --protocol http --gateway http://127.0.0.1:8000",
    ],
}
IN_A_SANDBOX = re.compile(r"sandbox|Shell-v0|CodeTests-v0")
BLOCKS = [
    pytest.param(fence, id=fence.place, marks=() if fence.page in OFTEN else pytest.mark.slow)
    for page in pages()
    for fence in fences_of(page)
    if fence.language in SHELLS and not (fence.not_run or fence.run_by)
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """What stands at the address that pages name without telling how to start it."""
    with ServerProcess([]) as running:
        yield running


def session_of(server: ServerProcess) -> str:
    """A session at the beginning of its first episode."""
    wanted = {"env_id": "FrozenLake-v0", "reset": {"seed": 7}}
    made = httpx.post(f"{server.url}/v1/sessions", json=wanted, timeout=60)
    return str(made.raise_for_status().json()["session_id"])


def require_what_is_typed(text: str) -> None:
    """Skip a block that needs what this machine has not."""
    if "redis-server" in text:
        redis_server.program()
    if "--lang cpp" in text and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler: install g++")
    if IN_A_SANDBOX.search(text):
        working_sandbox()
    if "namespaces" in text:
        try:
            open_sandbox("namespaces").close()
        except SandboxUnavailableError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("fence", BLOCKS)
def test_a_block_is_typed(fence: Fence, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert not_to_be_run(fence.text) == [], fence.place
    require_what_is_typed(fence.text)
    make_readers_folder(tmp_path)
    text = fence.text
    if "$SERVER" in text:
        add_token(tmp_path / "tokens.yaml", "trainer", ["play"])
        add_token(tmp_path / "tokens.yaml", "ops", ["admin"])
    with Terminal(tmp_path) as terminal:
        for word, statements in BEFORE.items():
            if word in text:
                printed = [terminal.type(statement) for statement in statements]
                terminal.variables["SERVER"] = str(terminal.pid())
                text = text.replace("REGISTRATION_ID", printed[-1].split()[0])
        if "roll-serve" not in text and ":8000" in text and not terminal.ports:
            server: ServerProcess = request.getfixturevalue("server")
            terminal.ports[8000] = server.port
            terminal.variables["ID"] = session_of(server)
        terminal.type_block(text, ANSWERS)


# -- what types them ---------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(tmp_path) as typing:
        yield typing


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("printf told; false", "exit code 1\ntold"),
        ("false | printf told", "exit code 1\ntold"),
        ("curl http://127.0.0.1:8000/nothing", "exit code 7"),
        ("roll-serve --port nowhere", "it ended before it was ready"),
        ("python examples/http_environment.py 9000", "it ended before it listened"),
    ],
)
def test_a_command_that_fails_is_found(terminal: Terminal, typed: str, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        terminal.type(typed)


def test_a_command_that_does_not_end_is_ended(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_blocks, "_LIMIT_S", 0.2)
    with pytest.raises(AssertionError, match="it has not ended after"):
        terminal.type("sleep 600 & sleep 600")


def test_an_answer_that_is_an_error_is_no_success(terminal: Terminal, server: ServerProcess) -> None:
    terminal.ports[8000] = server.port
    with pytest.raises(AssertionError, match="exit code 22"):
        terminal.type("curl http://127.0.0.1:8000/nothing")


def test_what_is_exported_stays_for_the_next_command_and_what_is_asked_for_is_answered(
    terminal: Terminal,
) -> None:
    terminal.type_block("export A='one\ntwo'\ncat > answered", {"cat": "three"})
    assert terminal.type("printf '%s' \"$A $(cat answered)\"") == "one\ntwo three"
