"""`roll-env verify`, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.support.client_server import ServerProcess
from tests.support.code_items import HONEST, mbpp
from tests.support.roll_env import Done, in_a_process, roll_env
from tests.support.sandboxes import working_sandbox

SUM = {"question": "2 + 2", "response": "<answer>4</answer>"}


def verdict(done: Done) -> dict[str, object]:
    """The last line."""
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_verdict_is_a_line_of_json(tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_text(json.dumps(SUM))
    done = in_a_process("verify", "Arithmetic-v0", str(file))
    assert done.returncode == 0, done.stderr
    assert verdict(done) == {"score": 1.0, "outcome": "correct", "detail": "4"}


def test_a_program(tmp_path: Path) -> None:
    working_sandbox()
    file = tmp_path / "item.json"
    for code, outcome in ((HONEST, "correct"), ("def largest(numbers): exit(0)", "wrong")):
        file.write_text(json.dumps({**mbpp(), "response": f"```python\n{code}\n```"}))
        done = roll_env("verify", "CodeTests-v0", str(file), "--kwarg", "scoring=all")
        assert (done.returncode, verdict(done)["outcome"]) == (0, outcome)


def test_a_running_server_scores(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_text(json.dumps(SUM))
    done = roll_env("verify", "Arithmetic-v0", str(file), "--url", server.url)
    assert verdict(done)["outcome"] == "correct"


@pytest.mark.parametrize(
    ("env_id", "text", "code", "said"),
    [
        ("Arithmetic-v0", "{", 2, "no JSON"),
        ("Arithmetic-v0", "{}", 2, "response"),
        ("FrozenLake-v0", json.dumps(SUM), 2, "no verifier"),
        ("Nothing-v0", json.dumps(SUM), 2, "Nothing-v0"),
        ("CodeTests-v0", json.dumps({"response": "```python\npass\n```"}), 1, ""),
    ],
)
def test_what_cannot_be_scored(tmp_path: Path, env_id: str, text: str, code: int, said: str) -> None:
    file = tmp_path / "item.json"
    file.write_text(text)
    done = roll_env("verify", env_id, str(file))
    assert done.returncode == code
    assert said in done.stderr
    if code == 1:
        assert verdict(done)["outcome"] == "error"


def test_a_sandbox_that_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_text(json.dumps({**mbpp(), "response": f"```python\n{HONEST}\n```"}))
    done = in_a_process("verify", "CodeTests-v0", str(file), ROLLGYM_SANDBOX="nonsense")
    assert (done.returncode, verdict(done)["outcome"]) == (1, "error")
    assert "ROLLGYM_SANDBOX" in str(verdict(done)["detail"])


def test_a_file_that_is_not_there() -> None:
    done = roll_env("verify", "Arithmetic-v0", "nothing.json")
    assert done.returncode == 2
    assert "nothing.json cannot be read" in done.stderr


def test_integers_of_any_size_are_exact(tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_text('{"response": "1180591620717411303424", "answer": 1180591620717411303424}')
    done = in_a_process("verify", "Math-v0", str(file))
    assert (done.returncode, verdict(done)["score"]) == (0, 1.0), done.stderr


def test_a_server_takes_no_integer_beyond_the_wires_limit(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_text('{"question": "2 + 2", "response": "4", "id": 1180591620717411303424}')
    done = in_a_process("verify", "Arithmetic-v0", str(file), "--url", server.url)
    assert done.returncode == 1
    assert "the integer 1180591620717411303424 is not below 2**53" in done.stderr
    assert "Traceback" not in done.stderr
