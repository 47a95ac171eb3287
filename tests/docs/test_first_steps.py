"""The guides for newcomers are typed from the first command to the last, in an empty folder, and print what they show.

The pages are docs/guides/first_run.md, docs/guides/own_environment.md and examples/README.md.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollgym.clients.scaffold.package import package_files, package_names
from tests.support.processes import ROOT
from tests.support.shell_blocks import Terminal
from tests.support.snippets import Fence, fences_of
from tests.support.typed_commands import statements_of

FIRST_RUN, OWN_ENVIRONMENT = (
    ROOT / "docs" / "guides" / f"{name}.md" for name in ("first_run", "own_environment")
)
HERE = str(Path(__file__).relative_to(ROOT))
# Sizes are a test's; keys, names and order are the guide's.
SMALL = (
    "steps=1 warm_start.demonstrations=8 rollout.groups_per_step=2 rollout.group_size=2 "
    "'evaluation={every: 0, sets: {}}' tracking.tensorboard=false"
)
TRAINS = re.compile(r"roll-train --config (?!.*--dry-run)")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def shown(page: Path) -> list[str]:
    """The outputs of commands that a page shows without the commands."""
    return [fence.text for fence in fences_of(page) if fence.language == "text"]


def type_page(page: Path, folder: Path) -> str:
    """Type the blocks of a page that this test is named for; gives all that was printed."""
    printed: list[str] = []
    site = folder / "site"
    for fence in fences_of(page):
        if fence.run_by != HERE:
            continue
        for statement in statements_of(fence.text):
            if statement.startswith("cd "):
                folder = folder / statement.removeprefix("cd ")
                continue
            if statement == "pip install -e .":
                install(folder, site)
                continue
            with Terminal(folder) as terminal:
                terminal.variables = {**terminal.variables, "PYTHONPATH": str(site)}
                printed.append(terminal.type(smaller(statement)))
        if fence.language == "console":
            assert printed[-1].strip() == output_of(fence)
    return "\n".join(printed)


def smaller(statement: str) -> str:
    statement = statement.partition("  #")[0]
    if TRAINS.match(statement):
        return f"{statement} {SMALL}"
    if "roll-env audit" in statement:
        return f"{statement} --episodes 2 --budget-s 0.5"
    return statement


def output_of(fence: Fence) -> str:
    """What a block shows below its one command."""
    return fence.text.partition("\n")[2].strip()


def install(package: Path, site: Path) -> None:
    """Install a package as `pip install` does, into a folder of the test's and without a network."""
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site))
    command = [sys.executable, "-m", "pip", "install", *offline, "."]
    subprocess.run(command, cwd=package, check=True, timeout=120)


@pytest.mark.slow
def test_the_guide_of_a_first_run_is_typed(tmp_path: Path) -> None:
    printed = type_page(FIRST_RUN, tmp_path)
    (plan,) = shown(FIRST_RUN)
    assert plan in printed
    assert (tmp_path / "lake/runs/shorter/model/config.json").exists()
    assert (tmp_path / "lake/runs/frozen_lake/report.html").exists()


@pytest.mark.slow
def test_the_guide_of_an_own_environment_is_typed(tmp_path: Path) -> None:
    printed = type_page(OWN_ENVIRONMENT, tmp_path)
    checks, _ = shown(OWN_ENVIRONMENT)
    said = {NUMBER.sub("N", line) for line in printed.splitlines()}
    assert {NUMBER.sub("N", line) for line in checks.splitlines()} <= said
    assert (tmp_path / "word_hunt/runs/word_hunt/model/config.json").exists()


@pytest.mark.slow
def test_the_page_of_the_examples_is_typed(tmp_path: Path) -> None:
    type_page(ROOT / "examples" / "README.md", tmp_path)
    assert (tmp_path / "lake" / "run.yaml").exists()
    assert (tmp_path / "runs/frozen_lake/model/config.json").exists()


def test_the_entry_point_of_the_guide_is_the_one_that_is_written() -> None:
    (fence,) = (each for each in fences_of(OWN_ENVIRONMENT) if each.language == "toml")
    written = package_files(package_names("word_hunt"), "game")["pyproject.toml"]
    theirs = tomllib.loads(written)["project"]["entry-points"]
    assert tomllib.loads(fence.text)["project"]["entry-points"] == theirs


def test_the_table_of_the_examples_is_as_the_examples_are() -> None:
    command = [sys.executable, "docs/list_examples.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
