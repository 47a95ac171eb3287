"""A tree that is not installed, found by PYTHONPATH alone and without its history, serves and trains."""

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.process.local_server import LocalServer
from rollgym.version import __version__

ROOT = Path(__file__).parents[1]
TASKS = "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3, max_episode_steps: 2}}]"
TINY = (
    *(TASKS, "steps=1", "evaluation.every=0", "tracking.tensorboard=false"),
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 512}",
    "rollout={groups_per_step: 1, group_size: 2, max_turns: 2, max_new_tokens: 2}",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, and of the installed packages all but rollgym's own metadata, by links."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "rollgym", folder / "rollgym")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "packages").mkdir()
    places = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        *sys.path,
    }
    for place in (Path(each) for each in sorted(places) if each.endswith("-packages")):
        for entry in place.iterdir():
            ours = "rollgym" in entry.name or entry.suffix == ".pth"
            if not ours and not (link := folder / "packages" / entry.name).exists():
                link.symlink_to(entry)
    return folder


@pytest.fixture
def python(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a module of the tree, by the interpreter that the virtual environment was made with."""
    base = str(getattr(sys, "_base_executable", sys.executable))
    monkeypatch.setenv("PYTHONPATH", f"{tree}{os.pathsep}{tree / 'packages'}")
    monkeypatch.setattr(sys, "executable", base)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        done = subprocess.run([base, "-m", *words], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_has_no_metadata_and_its_version(python: Callable[..., str], tree: Path) -> None:
    assert python("rollgym.env_server", "--version") == f"rollgym {__version__}\n"
    found = json.loads(python("rollgym.clients.cli.main", "doctor", "--json"))
    findings = {each["check"]: each for each in found["findings"]}
    assert findings["installation"]["detail"] == f"{tree / 'rollgym'} is used as it is, it is not installed"
    assert (findings["rollgym"]["detail"], findings["numpy"]["status"]) == (__version__, "PASS")
    assert findings["server"]["status"] == "PASS"


def test_it_serves(python: Callable[..., str]) -> None:
    with LocalServer() as server, RemoteEnv(server.url, "FrozenLake-v0") as env:
        env.reset(seed=0)
        assert env.step("Right")[1] == 0


@pytest.mark.slow
def test_it_trains(python: Callable[..., str], tmp_path: Path) -> None:
    python("rollgym.trainer.cli", *TINY, f"output_dir={tmp_path / 'run'}")
    assert '"step": 1, "rollout/success"' in (tmp_path / "run" / "metrics.jsonl").read_text()
