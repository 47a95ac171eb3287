"""`roll-env`, as a user runs it."""

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest

from rollgym.clients.cli.main import client_parser, main
from rollgym.clients.cli.play import read_action
from rollgym.clients.process.terminal import picture_text
from tests.support.client_envs import Arm, Walk
from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT, running
from tests.support.roll_env import Done, in_a_process, roll_env

pytestmark = pytest.mark.usefixtures("forked_servers")


def findings(done: Done) -> dict[str, Any]:
    return {each["check"]: each for each in orjson.loads(done.stdout)["findings"]}


def test_the_page_of_the_command_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "roll_env.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `roll-env ")]
    known = {word for line in rows for word in re.findall(r"`(?:roll-env )?(\w+)[ `]", line.split(" | ")[0])}
    [commands] = [each for each in client_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    assert set(commands.choices) - known == set(), "a row of docs/roll_env.md"
    assert known - set(commands.choices) == set(), "there are no such commands"


def test_show_tells_what_an_environment_is_made_with(server: ServerProcess) -> None:
    with mock.patch.dict(os.environ, COLUMNS="80"):
        told = roll_env("show", "FrozenLake-v0", "--url", server.url).stdout
    assert "reward: `reward_schedule`: 1 at the goal" in told
    assert "size = 4  (a whole number from 2 to 64)\n      Side of a random map.\n" in told
    assert max(map(len, told.splitlines())) <= 80
    everything = orjson.loads(roll_env("show", "FrozenLake-v0", "--url", server.url, "--json").stdout)
    assert everything["kwargs_schema"]["properties"]["size"]["default"] == 4
    assert "did you mean FrozenLake-v0" in roll_env("show", "FrozenLak-v0", "--url", server.url).stderr


def test_list_shows_what_a_server_offers(server: ServerProcess) -> None:
    done = in_a_process("list", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert "Walk-v0" in done.stdout
    assert "A random walk." in in_a_process("list", "--url", server.url, COLUMNS="160").stdout
    # Where there is no room for descriptions, whole columns are left and each environment has one line.
    narrow = in_a_process("list", "--url", server.url, COLUMNS="60").stdout.splitlines()
    assert len(narrow) == 1 + len(orjson.loads(roll_env("list", "--url", server.url, "--json").stdout))
    listed = {
        env["env_id"]: env for env in orjson.loads(roll_env("list", "--url", server.url, "--json").stdout)
    }
    assert listed["Walk-v0"]["action_space"] == {"type": "UnicodeText"}
    assert roll_env("list", "--url", server.url, "--kind", "stateless").stdout.count("Walk-v0") == 0


def test_descriptions_are_shown_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = roll_env("list", "--env", "Tagged=tests.support.client_envs:Tagged")
    assert done.returncode == 0, done.stderr
    assert "[/no] [bold]tags :x:" in " ".join(done.stdout.split())


def test_list_starts_a_server_where_none_is_named() -> None:
    done = roll_env("list", "--env", "mine=tests.support.client_envs:Walk")
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    assert "FrozenLake-v0" in done.stdout


def test_a_person_plays_through_a_pipe(server: ServerProcess) -> None:
    typed = "left\n:info\n:help\n:reset 7\nright\n:quit\n"
    done = roll_env("play", "Walk-v0", "--url", server.url, "--kwarg", "risk=0", "--seed", "3", stdin=typed)
    assert done.returncode == 0, done.stderr
    local = Walk(risk=0)
    expected = [local.reset(seed=3)[0], local.step("left")[0], local.reset(seed=7)[0], local.step("right")[0]]
    places = [done.stdout.index(f"\n{text}\n") for text in expected]
    assert places == sorted(places)
    assert "Say anything." in done.stdout
    assert "actions: left, right" in done.stdout


def test_a_picture_is_drawn_where_there_are_colours_and_named_elsewhere(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "3")
    picture = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    drawn = picture_text(picture, coloured=True).split("\n")
    # Every third pixel of five rows and seven columns: two rows in one line, three columns.
    assert len(drawn) == 1
    assert drawn[0].count("▀") == 3
    assert "38;2;0;1;2;48;2;63;64;65m" in drawn[0]
    options = ("--kwarg", 'observation="image"', "--seed", "3")
    done = roll_env("play", "FrozenLake-v0", "--url", server.url, *options, stdin="Right\n")
    assert done.stdout.count("a picture of ") == 2
    assert max(map(len, done.stdout.splitlines())) < 120, "no pixel is written out"


def test_play_ends_with_its_input_and_tells_how_the_episode_ended(server: ServerProcess) -> None:
    done = roll_env("play", "Walk-v0", "--url", server.url, "--kwarg", "risk=1.0", stdin="left\n")
    assert done.returncode == 0, done.stderr
    assert "The episode is over: success." in done.stdout
    assert "Traceback" not in done.stderr


def test_play_asks_again_when_an_action_does_not_fit(server: ServerProcess) -> None:
    done = roll_env("play", "CartPole-v1", "--url", server.url, "--seed", "0", stdin="5\nleft\n1\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("expected 0 to 1") == 2
    assert "reward 1" in done.stdout


def test_actions_are_read_as_the_space_says() -> None:
    assert read_action(Walk().action_space, "[1]") == "[1]"
    assert read_action(Arm().action_space, "[0.5, -1]").tolist() == [0.5, -1.0]


@pytest.mark.parametrize("name", ["Walk", "Spelling"])
def test_check_passes_what_is_right(name: str) -> None:
    done = roll_env("check", f"tests.support.client_envs:{name}", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["status"] for each in findings(done).values()} == {"PASS"}
    assert findings(done)["served and played over the wire"]["detail"] == "equal to local play"


def test_check_names_what_is_wrong_and_what_to_do() -> None:
    done = roll_env("check", "tests.support.client_envs:Sloppy", "--json")
    assert done.returncode == 1
    failed = {name: each for name, each in findings(done).items() if each["status"] == "FAIL"}
    assert {
        "Gymnasium's check_env",
        "rewards are finite numbers",
        "terminated and truncated are bools",
        "info goes over the wire",
        'success in info["success"]',
        'instruction in info["instruction"]',
        "odd replies are answered",
        "equal seeds, equal episodes",
        "kwargs_schema fits the signature",
    } <= failed.keys()
    assert "client_envs.py" in failed["Gymnasium's check_env"]["remedy"]
    assert "self.np_random" in failed["equal seeds, equal episodes"]["remedy"]
    readable = roll_env("check", "tests.support.client_envs:Sloppy")
    assert readable.returncode == 1
    assert "FAIL odd replies are answered: '' raises ValueError: no action" in readable.stdout


@pytest.mark.parametrize("target", ["FrozenLake-v0", "CartPole-v1"])
def test_check_takes_registered_ids(target: str) -> None:
    done = roll_env("check", target, "--json")
    assert findings(done)["served and played over the wire"]["status"] == "PASS", done.stdout


def test_check_finds_a_seed_that_does_not_reach_other_processes(tmp_path: Any) -> None:
    (tmp_path / "hashed.py").write_text(
        "from tests.support.client_envs import Walk\n"
        "class Hashed(Walk):\n"
        "    def step(self, action):\n"
        "        observation, *rest = super().step(action)\n"
        "        return (f'{observation} {hash(observation)}', *rest)\n"
    )
    done = in_a_process("check", "hashed:Hashed", "--json", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stderr
    assert findings(done)["equal seeds, equal episodes"]["status"] == "PASS"
    assert findings(done)["equal in another process"]["status"] == "FAIL"


@pytest.mark.parametrize("frames", [[], ["--batch"]])
def test_bench_measures(server: ServerProcess, frames: list[str]) -> None:
    numbers = ["--sessions", "4", "--sessions", "8", "--seconds", "0.5"]
    done = roll_env(
        "bench", "Walk-v0", "--url", server.url, *numbers, *frames, "--encoding", "msgpack", "--json"
    )
    assert done.returncode == 0, done.stderr
    results = orjson.loads(done.stdout)
    assert [each["sessions"] for each in results] == [4, 8]
    for each in results:
        assert each["steps"] > 0
        assert 0 < each["latency_p50_ms"] <= each["latency_p99_ms"]
        assert each["client_cpu_us_per_step"] > 0
        assert each["server_cpu_us_per_step"] > 0
    table = roll_env("bench", "Walk-v0", "--url", server.url, *numbers, *frames)
    assert "steps/s" in table.stdout


def test_doctor_finds_this_installation_fit() -> None:
    done = roll_env("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert findings(done)["server"]["status"] == "PASS"
    assert findings(done)["import rollgym"]["detail"] == str(ROOT / "rollgym")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["play", "Walk-v0", "--url", "http://127.0.0.1:1", "--env", "a:B"], 2, "exclude"),
        (["play", "Walk-v0", "--kwarg", "risk"], 2, "KEY=VALUE"),
        (["check", "no_such_module:Env"], 2, "no module 'no_such_module'"),
        (["check", "tests.support.client_envs:Nope"], 2, "no attribute 'Nope'"),
        (["check", "NoSuchEnvironment-v0"], 2, "NoSuchEnvironment-v0"),
        (["bench", "Walk-v0", "--sessions", "0"], 2, "positive"),
        (["list", "--url", "nonsense"], 2, "nonsense"),
        (["list", "--env", "no_such_module:Env"], 2, "no_such_module"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], code: int, message: str) -> None:
    done = roll_env(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["list"], ["unregister", "x", "--gateway", "http://127.0.0.1:1"]])
def test_a_token_with_its_line_break_is_a_mistake_of_the_command_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLGYM_TOKEN", "token\n")
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "line break" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["play", "bench", "audit"])
@pytest.mark.parametrize("seed", ["-1", "9007199254740992", "1" * 6000, "٣", "1.0", "x"])
def test_a_seed_that_no_server_takes_is_a_mistake_of_the_command_line(
    command: str, seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "Walk-v0", f"--seed={seed}"])
    assert "a seed is a whole number from 0 below 2**53" in capsys.readouterr().err


def test_a_seed_that_no_server_takes_is_asked_for_again(server: ServerProcess) -> None:
    done = roll_env(
        "play", "Walk-v0", "--url", server.url, stdin=":reset -1\n:reset 9007199254740992\nleft\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a seed is a whole number") == 2


def test_refusals_of_the_server_are_told(server: ServerProcess) -> None:
    done = roll_env("play", "Nope-v0", "--url", server.url)
    assert done.returncode == 2
    assert "unknown_env" in done.stderr


@pytest.fixture(params=["list", "play", "verify"])
def reaching(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """A command that asks a server."""
    item = tmp_path / "item.json"
    item.write_text('{"response": "4"}')
    words = {"list": (), "play": ("Walk-v0",), "verify": ("Arithmetic-v0", str(item))}
    return (request.param, *words[request.param])


def test_without_a_server_it_is_told_soon_how_to_start_one(reaching: tuple[str, ...]) -> None:
    url = ServerProcess().url
    unreachable = roll_env(*reaching, "--url", url)
    assert unreachable.returncode == 2
    assert f"roll-env {reaching[0]}: no server answers at {url}: " in unreachable.stderr
    assert re.search(r"waited \d\.\d s: start one with `roll-serve`", unreachable.stderr), unreachable.stderr


def test_what_is_no_address_is_told(reaching: tuple[str, ...]) -> None:
    refused = roll_env(*reaching, "--url", "ftp://host")
    assert refused.returncode == 2
    assert "address" in refused.stderr


def test_a_command_that_is_terminated_ends_the_server_that_it_started() -> None:
    words = [sys.executable, "-m", "rollgym.clients.cli.main", "play", "FrozenLake-v0"]
    command = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running(command):
        assert command.stdout is not None
        assert command.stdout.readline()
        (server,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        command.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{server}").exists()


def test_a_termination_while_a_prompt_is_written_is_not_lost() -> None:
    program = """
import io, os, signal, sys
from rollgym.clients.cli import main, play
from rollgym.clients.process.terminal import ask

class Out(io.StringIO):
    told = False

    def flush(self):
        if self.getvalue() and not self.told:
            self.told = True
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(10))

def run(options):
    sys.stdout = Out()
    print("Type an action.")
    ask("> ")

play.run = run
sys.argv[1:] = ["play", "FrozenLake-v0"]
main.main()
"""
    words = [sys.executable, "-c", program]
    command = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with running(command):
        assert command.wait(60) == 128 + signal.SIGTERM


def test_a_termination_within_a_finaliser_is_not_lost() -> None:
    program = """
import os, signal, sys
from rollgym.clients.cli import main, play

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(10))

def run(options):
    finalised = Finalised()
    del finalised
    signal.pause()

play.run = run
sys.argv[1:] = ["play", "FrozenLake-v0"]
main.main()
"""
    command = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (command.returncode, command.stderr) == (128 + signal.SIGTERM, "")
