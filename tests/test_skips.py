"""The list of what CI skips: what is not listed fails a run, and so does an entry that skips nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import Entry, Skip, complaints, read_entries, summary

ROOT = Path(__file__).parents[1]
GPU = Entry("tests/a", "no accelerator", ("make test", ".ci/peers"), why="CI has none")
PEER = Entry("tests/b", "is not installed", ("make test",), run_by=".ci/peers")
DOCKER = Entry("tests/c", "no Docker", ("make test",), run_by=".ci/compose", unless="there is Docker")
ENTRIES = [GPU, PEER, DOCKER]
SKIPS = [
    Skip("tests/a/test_a.py", "torch finds no accelerator here"),
    Skip("tests/b.py", "it is not installed"),
]


def test_what_is_listed_may_be_skipped():
    assert complaints(SKIPS, ENTRIES, "make test") == []
    assert complaints(SKIPS, ENTRIES, "") == []


def test_an_unlisted_skip_is_named_with_file_reason_and_count():
    unlisted = [Skip("tests/a/test_a.py", "I was lazy")] * 2
    (line,) = complaints([*SKIPS, *unlisted], ENTRIES, "make test")
    assert "not listed for make test" in line
    assert "tests/a/test_a.py: I was lazy (2)" in line


def test_a_reason_counts_for_its_own_tests_alone():
    (line,) = complaints([*SKIPS, Skip("tests/d.py", "it is not installed")], ENTRIES, "make test")
    assert "tests/d.py" in line


def test_a_step_may_not_skip_what_it_runs_for_others():
    (line,) = complaints(SKIPS, ENTRIES, ".ci/peers")
    assert "tests/b.py" in line


def test_an_entry_that_skips_nothing_is_named_where_it_is_certain():
    (line,) = complaints(SKIPS[:1], ENTRIES, "make test")
    assert "remove the entry: tests/b: is not installed" in line


def test_a_single_file_may_skip_less_than_the_list():
    assert complaints([], ENTRIES, "") == []


def test_the_summary_says_what_runs_each_skip():
    assert summary(SKIPS, ENTRIES) == [
        "1 tests/a: no accelerator [CI has none]",
        "1 tests/b: is not installed [run by .ci/peers]",
    ]


@pytest.mark.parametrize(
    ("run_by", "why"), [("", ""), (".ci/peers", "no GPU"), ("make test", "")], ids=["none", "both", "itself"]
)
def test_an_entry_says_either_who_runs_it_or_why_nobody_does(run_by, why):
    with pytest.raises(ValueError, match=r"either run_by or why|cannot run what it skips"):
        Entry("tests/a", "x", ("make test",), run_by=run_by, why=why)


def test_the_steps_of_the_list_name_themselves_and_are_part_of_ci():
    in_ci = (ROOT / ".ci/run").read_text()
    for step in {step for entry in read_entries() for step in (entry.run_by, *entry.skipped_in) if step}:
        target = step.removeprefix("make ")
        recipe = (ROOT / ("Makefile" if target != step else step)).read_text()
        assert re.search(rf"ROLLGYM_CI_STEP=['\"]?{re.escape(step)}\b", recipe), (
            f"{step} does not name itself"
        )
        assert step == ".ci/run" or re.search(rf"{re.escape(step)}\b", in_ci), f".ci/run does not run {step}"


def test_every_entry_is_of_tests_that_are_there():
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    for entry in read_entries():
        assert any(path.startswith(entry.tests) for path in paths), entry.name


PROBE = """
import pytest

pytest.importorskip("json")

def test_passes():
    pass

@pytest.mark.skip(reason="no accelerator")
def test_skipped():
    pass

@pytest.mark.xfail(reason="is broken", strict=True)
def test_fails_as_expected():
    assert False
"""
LIST = """
[[skip]]
tests = "test_probe.py"
reason = "{reason}"
skipped_in = ["make test"]
why = "CI has none"
"""
CONFTEST = """
from pathlib import Path
from tests.support.skips import SkipCheck, read_entries

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipCheck(read_entries(Path(__file__).parent / "list.toml"), "make test"))
"""


def probed(folder: Path, reason: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the check on a file with one skip and a module that cannot be imported here."""
    (folder / "test_probe.py").write_text(PROBE)
    (folder / "test_module.py").write_text("import pytest\n\npytest.importorskip('no_such_module')\n")
    (folder / "conftest.py").write_text(CONFTEST)
    modules = '\n[[skip]]\ntests = "test_module.py"\nreason = "no_such_module"\nskipped_in = ["make test"]\nwhy = "-"\n'
    (folder / "list.toml").write_text(LIST.format(reason=reason) + modules)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        *options,
        str(folder),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120, check=False
    )


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "workers"])
def test_a_run_with_what_is_listed_passes_and_prints_it(tmp_path, options):
    done = probed(tmp_path, "no accelerator", *options)
    assert done.returncode == 0, done.stdout
    assert "2 skipped in CI" in done.stdout
    assert "1 test_probe.py: no accelerator [CI has none]" in done.stdout


def test_a_run_fails_for_a_skip_that_is_not_listed_and_an_entry_that_skips_nothing(tmp_path):
    done = probed(tmp_path, "another reason")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "skipped and not listed for make test" in done.stdout
    assert "remove the entry: test_probe.py: another reason" in done.stdout
