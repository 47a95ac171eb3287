"""What `roll-env init` writes is a package that passes every check that its author would run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest

from rollgym.clients.cli.main import main
from rollgym.clients.scaffold.package import KINDS, NameRefusedError, package_files, package_names
from rollgym.trainer.config.load import load_settings
from tests.support.users_environment import make_users_environment

LONGEST = "abcdefghijklmnopqrstuvwx"
MARKS = ("scaffold_name", "scaffold-name", "ScaffoldName", "ScaffoldObject")


def run(
    *command: str, cwd: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | (variables or {}), capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(
    "typed", ["word_ladder", "word-ladder", "WordLadder", "Word Ladder", "WordLadder-v0"]
)
def test_all_names_follow_from_one(typed: str) -> None:
    names = package_names(typed)
    assert (names.module, names.project, names.camel, names.env_id) == (
        "word_ladder",
        "word-ladder",
        "WordLadder",
        "WordLadder-v0",
    )


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("", "not a name for a package"),
        ("2048", "begin with one of the letters"),
        ("Mühle", "only these, digits"),
        ("../lake", "not a name for a package"),
        ("lake\n", None),
        ("x" * 1_000_000, "has at most 24 characters"),
        ("class", "a keyword of Python"),
        ("json", "a module of Python's standard library"),
        ("tests", "a folder of the package"),
        ("numpy", "numpy is an installed package"),
        ("rollgym", "rollgym is an installed package"),
        ("typing-extensions", "is an installed package"),
        ("yaml", "yaml is a module already, at "),
        ("frozen_lake", "FrozenLake-v0 is an environment of rollgym"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_reason(typed: str, reason: str | None) -> None:
    if reason is None:
        assert package_names(typed).module == "lake"
        return
    with pytest.raises(NameRefusedError) as refused:
        package_names(typed)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 240


@pytest.mark.parametrize(("name", "kind"), [("Any", "game"), ("field", "tools"), ("draw_task", "verifier")])
def test_a_name_that_the_code_needs_is_refused(name: str, kind: str) -> None:
    with pytest.raises(NameRefusedError, match="a name that the code uses already"):
        package_files(package_names(name), kind)


def test_a_wrong_name_or_a_second_time_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "word_ladder"]) == 0
    told = capsys.readouterr().out
    assert "next: cd word_ladder && pip install -e . && pytest && roll-env check WordLadder-v0" in told
    assert main(["init", "word_ladder"]) == 2
    assert capsys.readouterr().err == (
        "roll-env init: word_ladder exists already, and nothing is overwritten: give another name\n"
    )
    assert main(["init", "json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["word_ladder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", LONGEST])
def test_a_package_is_linted_and_formatted_whatever_its_name(tmp_path: Path, kind: str, name: str) -> None:
    for path, text in package_files(package_names(name), kind).items():
        assert not any(mark in path or mark in text for mark in MARKS), path
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    ruff = str(Path(sys.executable).with_name("ruff"))
    for command in (("check",), ("format", "--check", "--diff")):
        done = run(ruff, *command, "--no-cache", ".", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_of_a_game_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(package_files(package_names("word_ladder"), "game")["train.yaml"])
    settings = load_settings(tmp_path / "train.yaml")
    assert [task.env_id for task in settings.tasks] == ["WordLadder-v0"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind, and with all three installed in `site`."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        done = run(
            sys.executable, "-m", "rollgym.clients.cli.main", "init", f"my_{kind}", "--kind", kind, cwd=folder
        )
        assert done.returncode == 0, done.stderr
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", "site")
    done = run(
        sys.executable, "-m", "pip", "install", *offline, *(f"./my_{kind}" for kind in KINDS), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_package_passes_its_own_tests_without_being_installed(packages: Path, kind: str) -> None:
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=packages / f"my_{kind}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["game", "verifier"])
def test_an_installed_package_is_checked_by_its_id(packages: Path, kind: str) -> None:
    words = ("-m", "rollgym.clients.cli.main", "check", f"My{kind.title()}-v0", "--json")
    done = run(sys.executable, *words, cwd=packages, variables={"PYTHONPATH": str(packages / "site")})
    report = orjson.loads(done.stdout)
    assert report["ok"], report
    assert [each for each in report["findings"] if each["status"] != "PASS"] == []


@pytest.mark.slow
def test_pyright_finds_nothing_to_complain_of(packages: Path, tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if pyright is None:
        pytest.skip("pyright is not installed: `make pyright` installs it")
    python = make_users_environment(tmp_path / "venv")
    for kind in KINDS:
        done = run(pyright, "--warnings", f"--pythonpath={python}", cwd=packages / f"my_{kind}")
        assert done.returncode == 0, done.stdout
