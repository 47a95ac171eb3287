"""What clients are told of an environment's failure: its class and message, no stack and no paths."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rollgym.env_server.operations.runner import environment_error
from rollgym.env_server.workers.base import EnvironmentRaised
from tests.support.fragile_envs import RAISED
from tests.support.wire import Server

ISOLATIONS = ("inline", "thread", "process")


@pytest.fixture(scope="module")
def fragile() -> Iterator[Server]:
    served = [
        part
        for isolation in ISOLATIONS
        for part in (
            *("--env", f"{isolation}=tests.support.fragile_envs:Fragile"),
            *("--isolation", f"{isolation}={isolation}"),
        )
    ]
    with Server(*served) as server:
        yield server
        assert "failed inside the server" not in server.log()


def harmless(answer: Any) -> None:
    text = json.dumps(answer)
    for secret in ("/home", "secret", "Traceback", 'File \\"', ".py", "site-packages"):
        assert secret not in text, text


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
async def test_whatever_an_environment_raises(fragile: Server, isolation: str, binary: bool) -> None:
    async with fragile.socket(binary=binary) as socket:
        made = await socket.make(isolation)
        for name in RAISED:
            problem = (await socket.ask("step", session_id=made, action=f"raise {name}"))["error"]
            assert problem["code"] == "env_error", name
            assert problem["error_class"] == name
            harmless(problem)
            assert len(problem["message"]) <= 500
            await socket.call("reset", session_id=made)
        for info in ("object", "circular", "deeper", "surrogate", "lock"):
            answer = await socket.ask("step", session_id=made, action=f"info {info}")
            assert answer["error"]["code"] == "env_error", info
            harmless(answer)
            await socket.call("reset", session_id=made)


@pytest.mark.parametrize(
    "message",
    [
        "see /home/someone/secret.txt",
        "[Errno 2] No such file or directory: '/var/lib/secret/key.pem'",
        "C:\\Users\\someone\\secret.txt is gone",
        "~/secret/data.txt",
        "file:///home/someone/secret.txt",
        "/home/someone/secret with spaces/x.txt:12",
        '"/home/someone/secret.txt"',
        "(/home/someone/secret.txt)",
        "path=/home/someone/secret.txt",
        "\\\\server\\share\\secret.txt",
        "x" * 490 + " /home/someone/secret.txt",
    ],
)
def test_paths_are_taken_out(message: str) -> None:
    problem = environment_error(EnvironmentRaised("OSError", message)).to_problem()
    for secret in ("/home", "secret", "someone", "/var"):
        assert secret not in problem["message"], problem["message"]
    assert problem["message"] in problem["detail"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "cannot read /srv/levels/x.txt because the level is too wide and the box a/b is not there",
            "cannot read <path> because the level is too wide and the box a/b is not there",
        ),
        ("/srv/levels is missing, use and/or replace it", "<path> is missing, use and/or replace it"),
        ("see '/srv/a b/x y.txt' and \"/etc/keys\" too", "see '<path>' and \"<path>\" too"),
        ("C:\\Users\\me\\x.txt is gone / was moved", "<path> is gone / was moved"),
    ],
)
def test_what_stands_beside_a_path_stays(message: str, shown: str) -> None:
    assert environment_error(EnvironmentRaised("E", message)).extra["message"] == shown


@pytest.mark.parametrize("message", ["x" * 10**6, "/a" * 500_000, "a/" * 500_000, "\\" * 10**6, "~/" * 10**6])
def test_long_messages_are_cut_without_much_ado(message: str) -> None:
    assert len(environment_error(EnvironmentRaised("E", message)).extra["message"]) <= 500


@pytest.mark.parametrize(
    "message",
    [
        *("1/2 of 3/4", "either/or", "https://example.org/a/b is a link", "a - b / c"),
        "Left / Right / Up / Down are the actions, and / or none of them",
        "write it as \\frac{1}{2} or \\sqrt{3}",
    ],
)
def test_what_is_no_path_stays(message: str) -> None:
    assert environment_error(EnvironmentRaised("E", message)).extra["message"] == message
