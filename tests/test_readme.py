"""The README's examples are the repository's, and they run."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import running

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLE = (ROOT / "examples" / "custom_environment.py").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def custom_environment():
    spec = importlib.util.spec_from_file_location(
        "custom_environment", ROOT / "examples/custom_environment.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Countdown()


def test_the_custom_environment_is_the_one_that_is_run():
    (block,) = [block for block in blocks("python") if "class Countdown" in block]
    code = EXAMPLE.split('"""\n', 1)[1].lstrip("\n")
    assert block.strip() == code.strip()
    body = block[block.index("class Countdown") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


def test_the_custom_environment_passes_the_check():
    result = subprocess.run(
        [sys.executable, "-m", "rollgym.clients.cli.main", "check", "examples.custom_environment:Countdown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_custom_environment_passes_the_audit_without_a_warning():
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "rollgym.clients.cli.main",
                "audit",
                "examples.custom_environment:Countdown",
            ),
            *("--fail-on", "warning"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_who_says_one_number_to_the_custom_environment_is_paid_for_it_at_times():
    """Where nobody but who solves it is paid, its own report card warns that there is nothing to learn from."""
    env = custom_environment()
    returns = set()
    for seed in range(100):
        env.reset(seed=seed)
        returns.add(sum(env.step("1")[1] for _ in range(env.metadata["max_episode_steps"])))
    assert returns == {0.0, 1.0}


def test_the_custom_environment_is_served_from_the_working_directory():
    """As a console command does it, which has no working directory on its path."""
    start = "import sys; sys.path[:] = [p for p in sys.path if p]; from rollgym.env_server.cli import main; main()"
    served = "examples.custom_environment:Countdown"
    command = [sys.executable, "-P", "-c", start, "--port", "0", "--env", served]
    with running(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        assert "rollgym serving on" in server.stdout.readline()
        server.terminate()
        assert server.wait(30) == 0


def typed(command: str) -> list[str]:
    """The words of the command that begins so."""
    (line,) = [line for block in blocks("bash") for line in block.splitlines() if line.startswith(command)]
    return shlex.split(line, comments=True)[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "command", "more", "answers", "said"),
    [
        # With so few episodes; with those of the page it takes a quarter of a minute.
        (
            "rollgym.clients.cli.main",
            "roll-env audit examples",
            ("--episodes", "5", "--budget-s", "10"),
            "",
            "Countdown  episodic",
        ),
        (
            "rollgym.trainer.cli",
            "roll-train rollout --policy human",
            (),
            "9\n8\n7\n6\n5\n4\n3\n2\n1\n0\n" * 20,
            "success 1.0",
        ),
    ],
    ids=["audit", "human"],
)
def test_the_custom_environment_is_audited_and_played(program, command, more, answers, said, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = subprocess.run(
        [sys.executable, "-m", program, *typed(command), *more],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=answers,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert said in result.stdout


def test_every_file_that_the_readme_names_exists():
    for path in re.findall(r"\]\(((?:docs|examples|benchmarks)/[^)]+)\)", README):
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_the_commands_are_those_of_the_makefile():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= targets


def test_the_custom_environment_ends_at_its_limit():
    """Its own report card warns of one that does not."""
    env = custom_environment()
    env.reset(seed=0)
    ends = [env.step("never")[2:4] for _ in range(env.metadata["max_episode_steps"])]
    assert ends == [(False, False)] * 19 + [(False, True)]
