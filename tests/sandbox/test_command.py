"""`roll-env sandbox`, as a user calls it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgym.sandbox.command import sandbox_parser
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.selection import open_sandbox

_COMMAND = [sys.executable, "-m", "rollgym.clients.cli.main", "sandbox"]


@pytest.fixture(scope="module", autouse=True)
def _some_sandbox() -> None:
    try:
        open_sandbox().close()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def run(source: Path, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [*_COMMAND, "run", *arguments, str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_a_result_is_one_json_object(tmp_path: Path) -> None:
    source = tmp_path / "p.py"
    source.write_text("import os, sys; print(input(), len(os.environ) > 20); sys.exit(3)")
    done = run(source, "--lang", "python", "--timeout", "30", "--json", input="hello\n")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["stdout"] == "hello False\n"
    assert (answer["outcome"], answer["exit_code"], answer["signal"]) == ("non_zero_exit", 3, None)
    assert answer["wall_seconds"] > 0
    assert answer["guarantees"]["level"] in ("container", "namespaces", "landlock")


def test_limits_arrive_and_input_that_never_ends_is_no_obstacle(tmp_path: Path) -> None:
    source = tmp_path / "p.sh"
    source.write_text("head -c 9000 /dev/zero; ulimit -n; sleep 60")
    reading, writing = os.pipe()
    try:
        done = run(source, "--lang", "bash", "--timeout", "3", "--fds", "77", "--output-kb", "1", "--json",
                   stdin=reading)  # fmt: skip
    finally:
        os.close(reading)
        os.close(writing)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["outcome"], answer["stdout_truncated"]) == (0, "time_limit", True)
    assert len(answer["stdout"]) == 1024


def test_people_see_the_program_and_a_line_about_it(tmp_path: Path) -> None:
    source = tmp_path / "p.sh"
    source.write_text('echo "$1"')
    done = subprocess.run(
        [*_COMMAND, "run", "--lang", "bash", "--timeout", "30", str(source), "word"],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stderr.startswith("ok; ")
    assert (done.returncode, done.stdout) == (0, "word\n")


def test_mistakes_are_told(tmp_path: Path) -> None:
    missing = run(tmp_path / "missing.py", "--lang", "python")
    assert (missing.returncode, "No such file" in missing.stderr) == (2, True)
    source = tmp_path / "p.py"
    source.write_text("")
    for wrong in (("--pids", "0"), ("--lang", "ada"), ("--backend", "jail")):
        assert run(source, "--lang", "python", *wrong).returncode == 2
    refused = run(
        source, "--lang", "python", "--backend", "landlock", "--minimum-level", "namespaces", "--json"
    )
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["outcome"] == "sandbox_error"


def test_the_table_names_every_back_end() -> None:
    done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert {"namespaces", "bubblewrap", "landlock", "unsafe"} <= {
        line.split()[0] for line in done.stdout.splitlines() if line
    }


def test_the_command_starts_without_the_client() -> None:
    heavy = ("httpx", "numpy", "pydantic", "rich")
    code = f"import sys, rollgym.clients.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_what_help_says_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ("run", "check"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
            sandbox_parser().parse_args([words, "--help"])
        assert max(map(len, said.getvalue().splitlines())) <= 80, words
