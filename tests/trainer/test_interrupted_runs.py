"""Runs that end before their time: what is saved, what is said, and how they go on."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import RoleDiedError
from rollgym.trainer.records.checkpoint import CheckpointStore
from rollgym.trainer.records.ledger import Ledger, TaskEvent
from tests.support.processes import ROOT, end, env_server, read_lines, running, start_training, train_until

ROOM = 24_000
"""Bytes of a file that hold the run's tokenizer, and neither its records nor a checkpoint."""
CONFIG = """
seed: 3
steps: 3
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}
model: {hidden_size: 16, layers: 1, heads: 2, max_length: 96}
prompt: {context: single_turn, instruction: none}
rollout: {groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 0}
tracking: {tensorboard: false}
"""
EVALUATION_SET = (
    "evaluation.sets.held_out={env_id: FrozenLake-v0, kwargs: {size: 4, split: test, max_episode_steps: 6}, "
    "episodes: 4, baselines: false}"
)


class RunHere:
    """Runs `roll-train` in this process, which spares a process its imports, and acts where it says something."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._patch = patch

    def __call__(
        self, *words: str, at: str = "", act: Callable[[], object] = lambda: None
    ) -> tuple[int, str]:
        """Run it to its end; gives the exit code and all that it printed.

        Args:
            words: The command line.
            at: What the line says at which `act` is called, the first time.
            act: What happens then.
        """
        say, acted = RunConsole.say, False

        def listening(console: RunConsole, text: str) -> None:
            nonlocal acted
            say(console, text)
            if at and at in text and not acted:
                acted = True
                act()

        with self._patch.context() as patch:
            patch.setattr(RunConsole, "say", listening)
            code = main(list(words))
        printed = self._capture.readouterr()
        assert "Traceback" not in printed.err
        assert acted == bool(at)
        return code, printed.out + printed.err

    def well(self, *words: str) -> str:
        """Run it to an end without a fault; gives what it printed."""
        code, output = self(*words)
        assert code == 0, output
        return output

    def refused(self, *words: str) -> str:
        """Run it on what it refuses; gives the line that says so."""
        code, output = self(*words)
        assert code == 2, output
        return output.splitlines()[-1]


@pytest.fixture
def run(capfd, monkeypatch) -> RunHere:
    return RunHere(capfd, monkeypatch)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server("--allow-expert") as address:
        yield address


@pytest.fixture
def common(config: Path, url: str, tmp_path: Path) -> list[str]:
    return ["--config", str(config), "--env-url", url, f"output_dir={tmp_path}/run"]


def newest_step(directory: Path) -> int:
    checkpoint = CheckpointStore(directory / "checkpoints", 2).load_newest(lambda _: None)
    return -1 if checkpoint is None else checkpoint.state.step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_saved_and_says_how_to_go_on(run, common, tmp_path, number, code):
    before = signal.getsignal(number)
    ended, output = run(*common, "steps=100000", at="step 2:", act=send(number))
    assert ended == code, output
    assert signal.getsignal(number) == before
    assert "ending in order" in output
    saved = newest_step(tmp_path / "run")
    assert saved >= 2
    last = output.splitlines()[-1]
    assert f"checkpoints/step_{saved:06d} by the same command with checkpoint.resume=auto" in last
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(saved + 1)), "all that was trained is saved"
    output = run.well(*common, "checkpoint.resume=auto", f"steps={saved + 1}")
    assert f"resuming at step {saved}" in output


def test_the_second_ctrl_c_ends_at_once(common, tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import asyncio\n\n\nasync def reward(trajectory):\n    print('stuck', flush=True)\n"
        "    while True:\n        try:\n            await asyncio.sleep(1000)\n"
        "        except asyncio.CancelledError:\n            print('still stuck', flush=True)\n"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "rollgym.trainer.cli", *common, "rollout.reward=stuck:reward"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    with running(process):
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert any("still stuck" in line for line in process.stdout), "the first asks, and is not obeyed"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


def test_a_ctrl_c_while_the_process_ends_is_no_traceback(tmp_path):
    program = (
        "import atexit, sys, time\n"
        "atexit.register(lambda: (print('at the end', flush=True), time.sleep(60)))\n"
        "from rollgym.trainer.cli import main\n"
        "sys.exit(main(['config']))\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    with running(process):
        assert process.stdout is not None
        assert any("at the end" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_a_reward_that_blocks_does_not_put_off_the_first_ctrl_c(common, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef reward(trajectory):\n    print('asleep', flush=True)\n    time.sleep(1000)\n"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "rollgym.trainer.cli", *common, "rollout.reward=slow:reward"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    with running(process):
        assert process.stdout is not None
        assert any("asleep" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_run_interrupted_before_its_first_step_says_that_nothing_was_learnt(run, common):
    many = "evaluation.sets.held_out.episodes=500"
    code, output = run(
        *common,
        EVALUATION_SET,
        many,
        "evaluation.sets.held_out.distinct=false",
        "evaluation.sets.held_out.baselines=true",
        at="baseline",
        act=send(signal.SIGTERM),
    )
    assert code == 143
    assert "nothing was learnt yet, and the same command begins again" in output.splitlines()[-1]
    assert "resuming" not in run.well(*common, "steps=1"), "and it does, though resume is 'never'"


def test_two_runs_never_share_a_directory_and_a_killed_one_leaves_it(run, common, tmp_path):
    with running(start_training(*common, "steps=100000")) as process:
        assert process.stdout is not None
        assert any("step 1:" in line for line in process.stdout)
        message = run.refused(*common, "checkpoint.resume=auto")
        assert re.search(rf"{tmp_path}/run is in use by process {process.pid} on \S+: wait for it", message)
        process.kill()
        process.communicate()
    assert "it begins again" in run.well(*common, "checkpoint.resume=auto")


def test_a_mistake_does_not_burn_the_directory(run, common):
    assert "FrozenLike-v0" in run.refused(*common, "tasks.0.env_id=FrozenLike-v0", EVALUATION_SET)
    # Found in the first episodes, after the measurement of the start.
    wrong = "tasks.0.kwargs.size=nonsense"
    assert "size" in run.refused(*common, wrong, EVALUATION_SET)
    assert "step 1:" in run.well(*common, "steps=1")
    assert "holds a run already" in run.refused(*common, "steps=1")


@pytest.mark.slow
def test_a_warm_start_is_kept_through_a_kill_and_evaluations_are_made_up(run, common, tmp_path):
    directory = tmp_path / "run"
    common = [
        *common,
        "warm_start={demonstrations: 6, epochs: 1}",
        EVALUATION_SET,
        "checkpoint.resume=auto",
        "checkpoint.every=1",
    ]
    train_until("baseline", *common, "evaluation.sets.held_out.baselines=true")
    assert read_lines(directory / "metrics.jsonl") == []
    output = run.well(*common)
    assert "resuming at step 0" in output
    assert "warm start" not in output
    assert evaluated(directory) == [0, 3]

    # As if an evaluation had been due after step 2, and its process killed before it was made.
    go_back = f"checkpoint.resume={directory}/checkpoints/step_000002"
    run.well(*common, go_back, "evaluation.every=2")
    assert evaluated(directory) == [0, 2, 3]
    assert [line["step"] for line in read_lines(directory / "metrics.jsonl")] == [0, 1, 2, 2, 3, 3]


def evaluated(directory: Path) -> list[int]:
    lines = read_lines(directory / "metrics.jsonl")
    return [line["step"] for line in lines if any(key.startswith("evaluate/") for key in line)]


@pytest.mark.slow
def test_a_warm_start_alone_is_no_run(run, common, tmp_path):
    warm = "warm_start={demonstrations: 6, epochs: 1}"
    slow = [EVALUATION_SET, "evaluation.sets.held_out.baselines=true"]
    code, output = run(*common, warm, *slow, at="baseline", act=send(signal.SIGINT))
    assert code == 130
    assert "step_000000 by the same command with checkpoint.resume=auto" in output.splitlines()[-1]
    output = run.well(
        *common, "warm_start={demonstrations: 4, epochs: 1}", "steps=1", "checkpoint.resume=auto"
    )
    assert "warm_start.demonstrations differ from the settings of the warm start" in output
    assert "warm start on 4 expert" in output
    assert (tmp_path / "run" / "checkpoints" / "aside_step_000000").exists(), "nothing is lost"


def test_a_run_goes_on_past_a_damaged_checkpoint_and_every_task_has_a_last_fate(run, common, tmp_path):
    directory = tmp_path / "run"
    common = [*common, "checkpoint.resume=auto", "checkpoint.every=1", "rollout.max_staleness=1"]
    run.well(*common)
    assert last_fates(directory) == {"trained", "dropped"}, "nothing is left under way in a finished run"
    (directory / "checkpoints" / "step_000003" / "policy.pt").write_bytes(b"torn")
    output = run.well(*common, "steps=4")
    assert "passing over a damaged checkpoint" in output
    assert "resuming at step 2" in output
    assert last_fates(directory) == {"trained", "dropped"}


def test_a_refused_resume_loses_nothing(run, common, tmp_path):
    directory = tmp_path / "run"
    common = [*common, "steps=2", "checkpoint.every=1", "checkpoint.keep=5"]
    run.well(*common)
    under_way = directory / "rollout_log" / "000099.log"
    under_way.parent.mkdir(exist_ok=True)
    under_way.write_bytes(b"rollgym rollout log 1\n")
    named = f"checkpoint.resume={directory}/checkpoints/step_000001"
    assert "optimizer.learning_rate differ" in run.refused(*common, named, "optimizer.learning_rate=0.5")
    assert under_way.exists(), "what was sampled of later steps is still there for who goes on from them"
    run.well(*common, named)
    assert not under_way.exists(), "who goes back on purpose wants it played anew"


def test_a_run_goes_back_to_the_checkpoint_of_another_one_that_it_began_at(run, common, tmp_path):
    """A role that dies before the first checkpoint of its own does not have it forget what it began with."""
    run.well(*common, "steps=2")
    begins = [*common, f"output_dir={tmp_path}/on", "steps=4", "cluster.restart_after_s=0.01"]
    begins.append(f"checkpoint.resume={tmp_path}/run/checkpoints/step_000002")

    def dies() -> None:
        raise RoleDiedError("critic", "rank 1 of critic is gone")

    code, output = run(*begins, at="step 3:", act=dies)
    assert code == 0, output
    assert output.count("resuming at step 2") == 2
    assert [line["step"] for line in read_lines(tmp_path / "on" / "metrics.jsonl")] == [3, 4, 4]


def last_fates(directory: Path) -> set[str]:
    events = read_lines(directory / "ledger.jsonl")
    return set({event["task"]: event["fate"] for event in events}.values())


def test_a_full_disk_is_named_with_the_way_to_go_on(run, common, tmp_path):
    directory = tmp_path / "run"
    run.well(*common, "steps=1")
    checkpoint = directory / "checkpoints" / "step_000001" / "policy.pt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (checkpoint.stat().st_size // 2, limits[1]))
    try:
        last = run.refused(*common, "checkpoint.resume=auto", "checkpoint.every=1", "steps=4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(
        r"cannot write \S+step_000002\S*: File too large; go on from \S+step_000001 by the same", last
    )
    assert "resuming at step 1" in run.well(*common, "checkpoint.resume=auto", "steps=2")


def test_records_that_do_not_fit_are_named(run, common, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        last = run.refused(*common, "steps=100000")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(r"cannot write \S+\.(jsonl|partial\S*): File too large; ", last)


def test_a_first_checkpoint_that_does_not_fit_is_no_reason_to_refuse_the_advice(run, common, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        last = run.refused(*common, "steps=1", "checkpoint.every=1", "tracking.episodes=false")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(r"cannot write \S+partial\S*: File too large; no checkpoint was saved", last), last
    assert last.endswith("the same command with checkpoint.resume=auto begins again")
    assert "holds a run already" in run.refused(*common, "steps=1")


def test_a_server_that_is_gone_is_counted_and_waited_for_a_bounded_time(run, config, tmp_path):
    with running(start_server()) as server:
        assert server.stdout is not None
        url = server.stdout.readline().partition("serving on ")[2].split()[0]
        code, output = run(
            *("--config", str(config), f"output_dir={tmp_path}/run", "steps=100000", "--env-url", url),
            *("rollout.server_timeout_s=5", "rollout.episode_timeout_s=1"),
            at="step 2:",
            act=lambda: end(server),
        )
    assert code == 2, output
    assert re.search(rf"{url} has not answered for \d+ s, \d+ episodes wait", output), output
    assert "asking again" not in output
    assert newest_step(tmp_path / "run") >= 2
    assert "no server answers" in output.splitlines()[-1]
    assert "checkpoint.resume=auto" in output.splitlines()[-1]
    assert "timeout" not in (tmp_path / "run" / "ledger.jsonl").read_text(), "no episode is blamed for it"


def test_a_server_in_whose_place_another_stands_is_named_with_the_way_to_go_on(run, config, tmp_path):
    with running(start_server()) as server:
        assert server.stdout is not None
        url = server.stdout.readline().partition("serving on ")[2].split()[0]
        others: list[subprocess.Popen[str]] = []

        def replace() -> None:
            end(server)
            words = ["--no-builtin", "--env", "examples.custom_environment:Countdown"]
            others.append(start_server(url.rpartition(":")[2], *words))

        try:
            code, output = run(
                *("--config", str(config), f"output_dir={tmp_path}/run", "steps=100000", "--env-url", url),
                at="step 2:",
                act=replace,
            )
        finally:
            for other in others:
                end(other)
    assert code == 2, output
    last = output.splitlines()[-1]
    assert "unknown_env: there is no environment 'FrozenLake-v0'" in last
    assert f"`roll-env list --url {url}` shows what that server has" in last
    assert re.search(r"go on from \S+ by the same command with checkpoint.resume=auto$", last)
    assert newest_step(tmp_path / "run") >= 2


def start_server(port: str = "0", *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollgym.env_server", "--port", port, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def kill_embedded_server() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
    (server,) = [
        child
        for child in children
        if b"--stop-at-end-of-input" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(int(server), signal.SIGKILL)


def test_an_embedded_server_that_dies_ends_the_run_at_once_where_nothing_is_restarted(run, config, tmp_path):
    common = ["--config", str(config), f"output_dir={tmp_path}/run", "steps=100000", "cluster.restarts=0"]
    code, output = run(*common, at="step 1:", act=kill_embedded_server)
    assert code == 2
    last = output.splitlines()[-1]
    assert "the embedded environment server ended by itself, with code -9; nothing is started again" in last
    assert "(cluster.restarts 0); go on from" in last
    assert newest_step(tmp_path / "run") >= 1


@pytest.mark.slow
def test_an_embedded_server_that_dies_is_started_again_and_the_run_goes_on(run, config, tmp_path):
    words = ["--config", str(config), f"output_dir={tmp_path}/run", "steps=4", "checkpoint.every=1"]
    code, output = run(*words, "cluster.restart_after_s=0.01", at="step 2:", act=kill_embedded_server)
    assert code == 0, output
    assert "the embedded environment server ended by itself, with code -9" in output
    assert "with code -9; it is started again in 0.01 s" in " ".join(output.split())
    assert "the embedded environment server is back" in output
    assert "resuming at step" not in output, "nothing that was learnt is gone with it"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["step"] for line in metrics if "loss/policy" in line]
    assert trained == [1, 2, 3, 4]
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    assert sum(ledger.fate(task) is TaskEvent.TRAINED for task in range(100)) == 4 * 2
    ledger.close()
