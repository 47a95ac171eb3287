"""`roll-env eval`, as a user runs it, against a real server of environments and an endpoint on loopback."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollgym.clients.cli.main import main
from rollgym.clients.evaluation.player import _is_of_the_reply
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.evaluation.reporting.page import render_page
from rollgym.trainer.evaluation.reporting.run_folder import read_run
from tests.support.chat_model import called, one_after_another, refused, said, walks_to_the_goal
from tests.support.client_server import ServerProcess
from tests.support.judge_double import JudgeDouble
from tests.support.processes import ROOT
from tests.support.roll_env import Done, roll_env

pytestmark = pytest.mark.usefixtures("forked_servers")

KEY = "sk-test-0123456789"


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def evaluated(
    server: ServerProcess, double: JudgeDouble, output: Path, *more: str, env: str = "FrozenLake-v0"
) -> Done:
    arguments = ["--model", "tiny", "--base-url", double.url, "--url", server.url, "-o", str(output)]
    return roll_env("eval", env, *arguments, "-n", "3", *more)


def transcripts(output: Path) -> list[dict]:
    lines = (output / "transcripts.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda each: each["seed"])


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


def test_success_tokens_and_cost_are_printed_and_kept(server: ServerProcess, tmp_path: Path) -> None:
    with JudgeDouble(walks_to_the_goal) as double:
        done = evaluated(server, double, tmp_path / "out", "--price-in", "1", "--price-out", "10")
    assert done.returncode == 0, done.stderr
    assert "success   1.000 [0.439, 1.000]  3 of 3" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    requests = len(double.requests)
    kept = summary(tmp_path / "out")
    assert (kept["prompt_tokens"], kept["completion_tokens"]) == (10 * requests, 2 * requests)
    assert kept["cost"] == pytest.approx(requests * (10 * 1 + 2 * 10) / 1e6)
    assert kept["outcomes"] == {"solved": 3}
    assert {authorization for _, authorization in double.requests} == {f"Bearer {KEY}"}


def test_the_same_seeds_are_the_same_tasks(server: ServerProcess, tmp_path: Path) -> None:
    with JudgeDouble(walks_to_the_goal) as double:
        for name, more in (("a", ()), ("b", ("--concurrency", "1"))):
            assert evaluated(server, double, tmp_path / name, "--seed", "7", *more).returncode == 0
    first, second = transcripts(tmp_path / "a"), transcripts(tmp_path / "b")
    assert [each["messages"] for each in first] == [each["messages"] for each in second]
    assert [each["seed"] for each in first] == [7, 8, 9]


def test_the_report_page_shows_the_transcripts(server: ServerProcess, tmp_path: Path) -> None:
    with JudgeDouble(walks_to_the_goal) as double:
        evaluated(server, double, tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert run.notes == []
    assert len(run.episodes) == 3
    assert run.state == "finished"
    page = render_page(run)
    assert "FrozenLake-v0 played by tiny" in page
    assert "1.000 [0.439, 1.000]" in page
    assert "&lt;answer&gt;" in page
    assert "sampled tokens" not in page, "of a model behind an API they are not known"


def test_tools_are_offered_as_the_api_has_them(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(
        called("calculator", {"expression": "6 * 7"}),
        called("calculator", "{not json"),
        called("nothing_of_this_name", {}),
        said("<answer>42</answer>"),
    )
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "-n", "1", env="ToolUse-v0")
    assert done.returncode == 0, done.stderr
    first = double.requests[0][0]
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"calculator", "search", "weekday"}
    assert "Tools, as JSON" not in first["messages"][0]["content"]
    (transcript,) = transcripts(tmp_path / "out")
    results = [message for message in transcript["messages"] if message["role"] == "tool"]
    assert results[0] == {"role": "tool", "tool_call_id": "call-1", "content": "42"}
    assert "not a JSON object" in results[1]["content"]
    assert "nothing_of_this_name" in results[2]["content"]
    assert [turn["valid"] for turn in transcript["turns"]] == [True, False, False, True]


def test_what_a_model_says_otherwise_is_counted(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(
        said(None),
        said("I would rather", "length"),
        said(None, refusal="I cannot help with that."),
        said("", "content_filter"),
        walks_to_the_goal,
    )
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "--concurrency", "1")
    assert "4 unreadable, 1 cut at the length limit, 2 refused, 2 empty" in done.stdout
    assert "3 solved" in done.stdout


def test_a_reply_that_no_server_takes_is_the_models_failure(server: ServerProcess, tmp_path: Path) -> None:
    with JudgeDouble(lambda request: said("x" * 2**21)) as double:
        done = evaluated(server, double, tmp_path / "out", "-n", "1")
    assert summary(tmp_path / "out")["outcomes"] == {"failed": 1}
    assert "too_large" in done.stderr
    assert "0.000 [0.000, 0.793]  0 of 1" in done.stdout
    assert "1 unreadable" in done.stdout


@pytest.mark.parametrize(
    ("problem", "is_the_models"),
    [
        (ProblemError("too_large", "the request has 2000 bytes"), True),
        (ProblemError("invalid_action", "not in the space"), True),
        (ProblemError("too_large", "the reply has 2000 bytes", part="reply"), False),
        (ProblemError("env_error", "ValueError"), False),
    ],
)
def test_what_the_environment_says_too_much_of_is_not_the_models(
    problem: ProblemError, is_the_models: bool
) -> None:
    assert _is_of_the_reply(problem) is is_the_models


def test_arguments_that_are_nested_deeply_are_told(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(
        called("search", '{"query": ' + "[" * 1000 + "]" * 1000 + "}"),
        called("search", '{"query": ' + "[" * 100_000),
        said("<answer>42</answer>"),
    )
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "-n", "1", env="ToolUse-v0")
    assert done.returncode == 0, done.stderr
    assert "2 unreadable" in done.stdout


def test_waiting_is_as_long_as_the_server_asks_for(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(
        refused(429, "slow down", **{"Retry-After": "0.01"}),
        (503, {"Retry-After": "0"}, b"busy"),
        walks_to_the_goal,
    )
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "--concurrency", "1")
    assert done.returncode == 0
    assert "retried   1 rate limited, 1 server error" in done.stdout


def test_an_episode_without_a_reply_is_no_failure_of_the_model(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(refused(400, "bad field"), (200, {}, b"<html>"), walks_to_the_goal)
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "--concurrency", "1")
    assert "1 of 1 (2 of 3 not counted)" in done.stdout
    assert "1 request rejected, 1 unreadable answer" in done.stdout
    assert summary(tmp_path / "out")["outcomes"] == {"agent_error": 2, "solved": 1}


def test_a_context_that_is_too_long_is_a_result(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(
        refused(400, "This model's maximum context length is 10 tokens"), walks_to_the_goal
    )
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "--concurrency", "1")
    assert "2 of 3" in done.stdout
    assert "1 context overflow" in done.stdout


@pytest.mark.parametrize(
    ("answer", "said_to_the_user"),
    [
        (refused(401, f"Incorrect API key provided: {KEY}"), "--api-key-env"),
        (refused(404, "The model `tiny` does not exist"), "--model"),
        (refused(429, "no more insufficient_quota"), "no quota left"),
        ((307, {"Location": "https://elsewhere/v1"}, b""), "https://elsewhere/v1"),
    ],
)
def test_what_no_request_can_overcome_ends_it_at_once(
    server: ServerProcess, tmp_path: Path, answer: object, said_to_the_user: str
) -> None:
    with JudgeDouble(lambda request: answer) as double:
        done = evaluated(server, double, tmp_path / "out")
    assert done.returncode == 1
    assert said_to_the_user in done.stderr
    assert KEY not in done.stderr
    # The double, which is in this process, complains of connections that the command has dropped.
    assert sum(line.startswith("roll-env") for line in done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_no_model_server_is_named_at_once(server: ServerProcess, tmp_path: Path) -> None:
    done = roll_env(
        "eval", "FrozenLake-v0", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--url", server.url,
        "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "no model server at http://127.0.0.1:9/v1" in done.stderr


def test_tokens_that_are_not_reported_are_not_made_up(server: ServerProcess, tmp_path: Path) -> None:
    answers = one_after_another(said("Left", usage={}), walks_to_the_goal)
    with JudgeDouble(answers) as double:
        done = evaluated(server, double, tmp_path / "out", "--price-in", "1", "--price-out", "1")
    assert "the model server does not report them" in done.stdout
    assert summary(tmp_path / "out")["cost"] is None


def test_a_cost_that_the_server_reports_is_shown(server: ServerProcess, tmp_path: Path) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.5}
    with JudgeDouble(lambda request: said("Left", usage=usage)) as double:
        done = evaluated(server, double, tmp_path / "out", "--max-turns", "2")
    assert "3.00 as the model server reports" in done.stdout
    assert "3 truncated" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said_to_the_user"),
    [
        (["FrozenLake-v0", "--model", "m", "--price-in", "1"], "--price-out"),
        (["FrozenLake-v0", "--model", "m", "--base-url", "localhost:8000"], "--base-url"),
        (["FrozenLake-v0", "--model", "m", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["FrozenLake-v0", "--model", "m", "--extra", "[1]"], "JSON object"),
        (["FrozenLake-v0", "--model", "m", "--seed", str(2**53 - 1)], "below 2**53"),
        (["FrozenLake-v0", "--model", "m", "--extra", '{"stream": true}'], "stream"),
        (["a:B", "--model", "m", "--url", "http://127.0.0.1:1"], "name an id"),
        (["no_such_module:B", "--model", "m"], "there is no module 'no_such_module'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said_to_the_user: str) -> None:
    done = roll_env("eval", *arguments)
    assert done.returncode == 2
    assert said_to_the_user in done.stderr


def test_an_environment_that_is_not_text_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    with JudgeDouble(walks_to_the_goal) as double:
        done = evaluated(server, double, tmp_path / "out", env="CartPole-v1")
    assert (done.returncode, double.requests) == (1, [])
    assert "--gymnasium-text" in done.stderr


def test_results_are_never_written_over(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with JudgeDouble(walks_to_the_goal) as double:
        done = evaluated(server, double, tmp_path)
    assert done.returncode == 2
    assert "holds files already" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_a_class_of_the_users_own_is_served_for_the_command(tmp_path: Path) -> None:
    with JudgeDouble(lambda request: said("x" * 10)) as double:
        done = roll_env(
            "eval", "tests.support.client_envs:Spelling", "--model", "m", "--base-url", double.url, "-n", "1",
            "-o", str(tmp_path / "out"),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Spelling" in done.stdout


def test_an_interrupt_keeps_what_came(server: ServerProcess, tmp_path: Path) -> None:
    held = threading.Event()

    def answer(request: dict) -> tuple[int, dict[str, str], bytes]:
        if len(double.requests) > 20:
            process.send_signal(signal.SIGINT)
            held.wait(30)
        return walks_to_the_goal(request)

    with JudgeDouble(answer) as double:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "rollgym.clients.cli.main", "eval", "FrozenLake-v0", "--model", "m",
                "--base-url", double.url, "--url", server.url, "-n", "9", "--concurrency", "1",
                "-o", str(tmp_path / "out"),
            ],
            cwd=ROOT, env=os.environ.copy(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        stdout, stderr = process.communicate(timeout=60)
        held.set()
    assert process.returncode == 130, stderr
    kept = summary(tmp_path / "out")
    assert 0 < kept["played"] < 9
    assert len(transcripts(tmp_path / "out")) == kept["played"]
    assert "interrupted; what came is kept" in stderr
    assert f"{kept['played']} of 9 episodes" in stdout


def test_the_parser_knows_the_command() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--help"])
    assert ended.value.code == 0
