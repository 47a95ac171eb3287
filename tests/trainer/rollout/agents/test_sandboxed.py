"""Agents' programs in a sandbox: they reach the endpoint alone, and whatever they do ends with the episode."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollgym.sandbox.core.languages import host_toolchain
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.agents.black_box import open_black_box
from rollgym.trainer.rollout.agents.sandboxed import (
    PORT,
    SandboxedRunner,
    SandboxPlan,
    absolute_words,
    open_agent_sandbox,
    shown_paths,
)
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.tasks.task import Task
from tests.support.agent_policy import ScriptedPolicy, assert_recorded, service_of, tool_tokenizer
from tests.support.processes import ROOT

TOKENIZER = tool_tokenizer()
MAP = ["SFF", "FHF", "FFG"]
PACKAGES = [path for path in sys.path if path.endswith("site-packages")]
# One that every user can read, which the one that runs the tests may not be.
PYTHON = host_toolchain().python
EXAMPLE = str(ROOT / "examples" / "black_box_agent.py")


KINDS = ["namespaces", "bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
# What the image calls them; the image can be named, as its tests have it.
IMAGE_PYTHON = "python3"
IMAGE = os.environ.get("ROLLGYM_DOCKER_IMAGE")


@pytest.fixture(params=KINDS)
def kind(request):
    """Each sandbox that agents may be put into, as `agents.sandbox` names it."""
    return f"docker:{IMAGE}" if request.param == "docker" and IMAGE else request.param


def python_of(kind):
    return IMAGE_PYTHON if kind.startswith("docker") else PYTHON


def has_compiled_packages_of(python):
    """Whether it can import what is compiled for the Python that runs the tests."""
    asked = "import sys; print(sys.version_info[:2])"
    return subprocess.check_output([python, "-c", asked], text=True).strip() == str(sys.version_info[:2])


@asynccontextmanager
async def playing(pool, kind, words, script, *, grace_s=5.0, gate=None, shown=(), **plan):
    with TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        endpoint = Path(name) / "endpoint"
        options = {"memory_mb": 1024, "disk_mb": 64, "wall_seconds": 60.0, **plan}
        planned = SandboxPlan(kind, [*PACKAGES, *shown], **options)
        try:
            sandbox = await asyncio.to_thread(open_agent_sandbox, planned, words, endpoint, 4)
        except ConfigError as error:
            if "does not work here" not in str(error):
                raise
            pytest.skip(str(error))
        runner = SandboxedRunner(
            sandbox,
            words if kind.startswith("docker") else absolute_words(words),
            endpoint,
            4,
            {"PYTHONPATH": ":".join(PACKAGES)},
            grace_s,
            planned.limits,
        )
        policy = ScriptedPolicy(TOKENIZER, script, gate=gate)
        where = {"host": "", "port": 0, "public_url": f"http://127.0.0.1:{PORT}", "unix": endpoint}
        opening = open_black_box(
            service_of(policy, TOKENIZER), runner, time.time, max_body_bytes=1 << 20, **where
        )
        async with opening as black_box:
            player = EpisodePlayer(pool, lambda: None, 20, black_box=black_box)
            yield player, policy


TASK = Task(0, "FrozenLake-v0", seed=5, kwargs={"map": MAP})


async def played(pool, kind, words, script, **plan):
    async with asyncio.timeout(60), playing(pool, kind, words, script, **plan) as (player, policy):
        trajectory = await player.play(TASK, 0, 0)
    if trajectory.turns:
        assert_recorded(trajectory, policy.log)
    return trajectory


async def test_a_real_program_on_the_openai_package_plays_in_it(pool, kind):
    if not kind.startswith("docker") and not has_compiled_packages_of(PYTHON):
        pytest.skip(
            f"{PYTHON}, which sandboxes show, is another release of Python than the packages here are for"
        )
    words, script = [python_of(kind), EXAMPLE], ["Right", "Right", "Down", "Down"]
    # An image is shown what is named, and no argument of the command line.
    trajectory = await played(pool, kind, words, script, shown=[EXAMPLE])
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.SOLVED, 1.0), trajectory.detail
    assert len(trajectory.turns) == 4


async def test_it_reaches_the_endpoint_and_nothing_else(pool, kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    secret.chmod(0o644)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        code = f"""
import os, socket, sys, urllib.request
def works(act):
    try:
        act()
    except OSError:
        return False
    return True
port = {listening.getsockname()[1]}
print("network", works(lambda: socket.create_connection(("127.0.0.1", port), 1)))
print("file", works(lambda: open({str(secret)!r})), "root", works(lambda: open("/etc/x", "w")))
print("models", urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models").status)
print("trainer", "HOME" in os.environ and os.environ["HOME"], "PYTEST_CURRENT_TEST" in os.environ)
sys.exit(3)
"""
        trajectory = await played(pool, kind, [python_of(kind), "-c", code], [])
    assert trajectory.outcome is TrajectoryOutcome.AGENT_ERROR
    said = "network False file False root False models 200 trainer /work False"
    assert trajectory.detail == f"the agent's program ended with code 3: {said}"


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("", TrajectoryOutcome.AGENT_ERROR, "ended without an answer of the policy"),
        (
            "import sys; sys.exit('what a pity')",
            TrajectoryOutcome.AGENT_ERROR,
            "ended with code 1: what a pity",
        ),
        ("b'x' * (1 << 31)", TrajectoryOutcome.AGENT_ERROR, "was ended (memory_limit"),
        ("while True: print('x' * 100_000)", TrajectoryOutcome.AGENT_ERROR, "was ended (output"),
        ("import time; time.sleep(600)", TrajectoryOutcome.AGENT_ERROR, "was ended (time"),
    ],
)
async def test_every_end_has_its_outcome(pool, kind, code, outcome, detail):
    plan = {"wall_seconds": 2.0} if "sleep" in code else {}
    trajectory = await played(pool, kind, [python_of(kind), "-c", code], [], **plan)
    assert trajectory.outcome is outcome
    assert detail in trajectory.detail


def _marked(mark):
    """Return the processes with a word in their environment or command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found += [path.name] if mark in (path / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


async def test_what_forks_and_never_ends_goes_with_its_episode(pool, kind):
    code = (
        "import os, subprocess, sys, time, urllib.request, json\n"
        "words = [sys.executable, '-c', sys.argv[2], sys.argv[1]]\n"
        "many = [subprocess.Popen(words, stdout=-1, start_new_session=True) for _ in range(20)]\n"
        "for each in many: each.stdout.read(1)\n"  # it runs, and is seen under its name
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
        "urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)\n"
        "time.sleep(600)\n"
    )
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    words = [python_of(kind), "-c", code, mark, "import time; print(flush=True); time.sleep(600)"]
    gate = asyncio.Event()
    async with asyncio.timeout(60), playing(pool, kind, words, ["x"], gate=gate) as (player, policy):
        episode = asyncio.create_task(player.play(TASK, 0, 0))
        await policy.asked.wait()
        assert len(_marked(mark.encode())) >= 20
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        while _marked(mark.encode()):  # the kernel takes its time over namespaces
            await asyncio.sleep(0.02)
    assert policy.cancelled == 1


def test_paths_are_shown_once_and_none_of_the_systems(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "agent.py"
    script.touch()
    shown = shown_paths(
        ["/usr/share", str(venv / "lib"), "/data"], [str(venv / "bin" / "python"), str(script)]
    )
    assert {"/data", str(venv), str(script)} <= set(shown)
    assert not any(path.startswith(("/usr/", f"{venv}/")) for path in shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agents.sandbox=landlock"], "'landlock' is none of none, namespaces"),
        (["agents.sandbox_read_only=[src]"], "'src' must be an absolute path"),
        (
            ["agents.sandbox=namespaces", "agents.port=8000"],
            "agents.host, agents.port and agents.public_url are not",
        ),
        (
            ["agents.sandbox=namespaces", "rollout.agent=http://127.0.0.1:9/x"],
            "agents.sandbox confines programs",
        ),
        (
            ["agents.sandbox_memory_mb=99"],
            "agents.sandbox_memory_mb is read with agents.sandbox only: set that",
        ),
        (
            ["agents.grace_s=99", "rollout.agent=http://127.0.0.1:9/x"],
            "agents.grace_s is read where rollout.agent is a command line",
        ),
        (["agents.sandbox=docker:img", "rollout.agent=only-in-the-image"], None),
    ],
)
def test_settings_that_nobody_would_read_are_refused(tmp_path, words, message):
    def load():
        base = [f"output_dir={tmp_path}", "tasks=[{env_id: FrozenLake-v0}]", "rollout.agent=python x.py"]
        check_settings(load_settings(None, [*base, *words]))

    if message is None:
        load()
        return
    with pytest.raises(ConfigError) as caught:
        load()
    assert message in str(caught.value)


async def test_a_sandbox_that_does_not_work_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    plan = SandboxPlan("docker", [], memory_mb=64, disk_mb=16, wall_seconds=5.0)
    with pytest.raises(ConfigError, match=r"agents\.sandbox 'docker' does not work here"):
        open_agent_sandbox(plan, ["x"], tmp_path / "endpoint", 1)


@pytest.mark.parametrize("kind", ["namespaces", "bubblewrap"])
async def test_what_lies_below_a_folder_that_is_closed_to_others_is_shown(pool, kind, tmp_path):
    closed = tmp_path / "a home"
    closed.mkdir(mode=0o700)
    agent = closed / "agent.py"
    agent.write_text("import os; os.stat('nothing')")
    trajectory = await played(pool, kind, [PYTHON, str(agent)], [])
    assert "No such file or directory: 'nothing'" in trajectory.detail


async def test_what_programs_could_not_read_is_named_before_the_run(pool, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    agent = hidden / "agent.py"
    agent.touch()
    hidden.chmod(0)
    try:
        with pytest.raises(ConfigError, match=r"agent\.py cannot be read there"):
            async with playing(pool, "namespaces", [PYTHON, str(agent)], []):
                pass
    finally:
        hidden.chmod(0o700)
