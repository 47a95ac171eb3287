"""`from rollgym import ...`: every name is there, typed, and the one that the docs use."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import rollgym
from tests.support.snippets import fences_of, pages
from tests.support.users_environment import make_users_environment

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
WITH_TORCH = ("StepTokens", "SurrogateInputs", "TrajectoryBatch", "model_folder")
PACKAGES = ("clients", "envs", "env_server", "integrations", "rollgym", "sandbox", "trainer")
USERS_FILE = """
import rollgym
from collections.abc import Mapping

from rollgym import EnvClient, RemoteEnv, RemoteVectorEnv, RemoteVerifier, TaskVerifier, Verdict, VerifierEnv
from rollgym import load_settings, open_sandbox, verifier

reveal_type(RemoteEnv("http://127.0.0.1:8000", "FrozenLake-v0"))
reveal_type(rollgym.EnvClient("http://127.0.0.1:8000"))
reveal_type(RemoteVerifier)
reveal_type(open_sandbox())
reveal_type(load_settings(None))
reveal_type(rollgym.__version__)
reveal_type(rollgym.train("run.yaml", steps=1))
reveal_type(RemoteVectorEnv("http://127.0.0.1:8000", "FrozenLake-v0", 2))
reveal_type(rollgym.NamespaceSandbox().probe())


@verifier(tasks=[{"question": "What is 6 * 7?"}])
def exact(response: str, task: Mapping[str, object]) -> bool:
    return response == "42"


reveal_type(exact().score("42", {}))


class Whole(TaskVerifier):
    tasks = [{"question": "What is 6 * 7?"}]

    def grade(self, response: str, task: Mapping[str, object]) -> float:
        return 1.0


class Polite(VerifierEnv):
    def score(self, response: int, task: object) -> Verdict:
        return Verdict(1.0, "correct", "")


rollgym.RemotEnv
"""
REVEALED = (
    "rollgym.clients.client.env.RemoteEnv",
    "rollgym.clients.client.client.EnvClient",
    "rollgym.clients.client.verifier.RemoteVerifier",
    "rollgym.sandbox.core.base.Sandbox",
    "rollgym.trainer.config.run.RunSettings",
    "str",
    "pathlib.Path",
    "rollgym.clients.client.vector.RemoteVectorEnv",
    "rollgym.sandbox.core.base.Guarantees",
    "rollgym.envs.verifiers.base.Verdict",
)


def test_what_is_typed_is_what_is_loaded() -> None:
    tree = ast.parse((ROOT / "rollgym" / "__init__.py").read_text())
    (typed,) = (each for each in tree.body if isinstance(each, ast.If))
    imported = {
        alias.name: each.module
        for each in typed.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert {*imported, "__version__"} == set(rollgym.__all__)
    assert imported == rollgym._HOMES  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", rollgym.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rollgym, name) is not None
    assert name in dir(rollgym)


def test_no_name_but_those_of_training_brings_torch() -> None:
    code = (
        f"import sys, rollgym; [getattr(rollgym, name) for name in rollgym.__all__ if name not in {WITH_TORCH}];"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout == "[]\n", said.stderr


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'rollgym' has no attribute 'RemotEnv'"):
        rollgym.RemotEnv  # noqa: B018


def imported(program: str) -> list[str]:
    """The modules of ours that a program imports, but for the public face and the integrations beside it."""
    nodes = list(ast.walk(ast.parse(program)))
    named = [each.module or "" for each in nodes if isinstance(each, ast.ImportFrom)]
    named += [alias.name for each in nodes if isinstance(each, ast.Import) for alias in each.names]
    ours = [name for name in named if name.partition(".")[0] == "rollgym" and name != "rollgym"]
    return [name for name in ours if not name.startswith("rollgym.integrations.")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_this_face_and_no_other(path: Path) -> None:
    assert imported(path.read_text()) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_readers_are_shown_this_face_and_no_other(page: Path) -> None:
    programs = [fence for fence in fences_of(page) if fence.language == "python"]
    assert {fence.place: imported(fence.text) for fence in programs if imported(fence.text)} == {}


def test_an_import_past_the_face_is_found_wherever_it_stands() -> None:
    past = "import rollgym\n\ndef run():\n    from rollgym.trainer.cli import main\n    import rollgym.clients.client\n"
    assert imported(past) == ["rollgym.trainer.cli", "rollgym.clients.client"]


def test_the_packages_say_that_they_are_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["*"]


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert version("rollgym") == rollgym.__version__


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a file, and with an environment of its own that has rollgym in its site-packages."""
    folder = tmp_path_factory.mktemp("user")
    make_users_environment(folder / "venv")
    (folder / "user.py").write_text(USERS_FILE)
    return folder


def checked(user: Path, *command: str) -> str:
    """What a type checker says of the user's file."""
    ended = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1, ended
    return ended.stdout


@pytest.mark.slow
def test_mypy_knows_the_types_of_a_user(user: Path) -> None:
    said = checked(
        user,
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        f"--python-executable={user}/venv/bin/python",
        "user.py",
    )
    revealed = re.findall(r'Revealed type is "(?:def \(.*\) -> )?([\w.]+)', said)
    assert tuple(revealed) == REVEALED, said
    assert len(re.findall(" error: ", said)) == 2, said
    assert 'has no attribute "RemotEnv"' in said
    assert 'incompatible with supertype "rollgym.envs.verifiers.base.VerifierEnv"' in said


@pytest.mark.slow
def test_pyright_knows_the_types_of_a_user(user: Path) -> None:
    pyright = shutil.which("pyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if pyright is None:
        pytest.skip("pyright is not installed: `make pyright` installs it")
    said = checked(user, pyright, f"--pythonpath={user}/venv/bin/python", "user.py")
    revealed = re.findall(r'Type of ".*" is "(?:type\[)?(\w+)', said)
    assert revealed == [name.rpartition(".")[2] for name in REVEALED], said
    assert len(re.findall(" error: ", said)) == 2, said
    assert '"RemotEnv" is not a known attribute' in said
    assert 'Method "score" overrides class "VerifierEnv" in an incompatible manner' in said
