"""Back-ends of other packages: found by entry point, used by name, and held against the suite."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rollgym.sandbox.conformance import check_backend
from rollgym.sandbox.core.base import (
    Guarantees,
    Program,
    RunResult,
    Sandbox,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.kinds import BY_NAME
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.selection import known_backends, make_sandbox, open_cancellable, open_sandbox
from tests.support.processes import ROOT

PACKAGE = '''
import rollgym


class BorrowedSandbox:
    """Programs in a sandbox that is borrowed; what is promised is what is kept there."""

    name = "borrowed"

    def __init__(self, argument="unsafe"):
        self._inner = rollgym.open_sandbox(argument, minimum_level="none")

    def probe(self):
        return self._inner.probe()

    def run(self, program, *, files={}, stdin=b"", limits=rollgym.Limits(), collect=(), cancellation=None):
        given = {"files": files, "stdin": stdin, "limits": limits, "collect": collect}
        return self._inner.run(program, **given, cancellation=cancellation)

    def open_session(self, program, *, files={}, limits=rollgym.Limits()):
        return self._inner.open_session(program, files=files, limits=limits)

    def close(self):
        self._inner.close()
'''
ENTRIES = """[rollgym.sandboxes]
borrowed = borrowed_sandbox:BorrowedSandbox
broken = borrowed_sandbox:NoSuchClass
namespaces = borrowed_sandbox:BorrowedSandbox
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package, as `pip install --target` leaves it."""
    install(tmp_path, "borrowed-sandbox", ENTRIES)
    (tmp_path / "borrowed_sandbox.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("borrowed_sandbox", None)


def install(site: Path, name: str, entries: str) -> None:
    information = site / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entries)


def roll_env(site: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rollgym.clients.cli.main", "sandbox", *arguments],
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"} | environment,
        cwd=site, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_it_is_known_and_opened_by_its_name(site: Path) -> None:
    assert set(known_backends()) == {*BY_NAME, "borrowed", "broken"}
    sandbox = open_sandbox("borrowed", minimum_level="none")
    assert sandbox.run(Program("bash", "echo hi")).stdout == b"hi\n"
    sandbox.close()


def test_it_is_never_chosen_and_held_to_the_level_that_is_asked_for(site: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match="keeps the level none here, and landlock is asked for"):
        open_sandbox("borrowed")
    assert type(make_sandbox("namespaces")).__module__ == "rollgym.sandbox.local.backends"


def test_one_that_is_broken_is_named_with_its_package(site: Path) -> None:
    with pytest.raises(
        SandboxUnavailableError, match="broken of the package borrowed-sandbox cannot be made"
    ):
        make_sandbox("broken")


def test_one_name_in_two_packages_is_refused(site: Path) -> None:
    install(site, "another", "[rollgym.sandboxes]\nborrowed = another:Sandbox\n")
    with pytest.raises(ValueError, match="in several packages, another and borrowed-sandbox: uninstall"):
        make_sandbox("borrowed")
    told = roll_env(site, "check", "borrowed")
    assert (told.returncode, "Traceback" in told.stderr) == (2, False)
    assert "uninstall all but one" in told.stderr


def test_the_command_shows_checks_and_uses_it(site: Path) -> None:
    checked = roll_env(site, "check", "borrowed:unsafe")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "pass  a session answers until it is closed\n" in checked.stdout
    assert "skip  the disk limit is kept: it makes no promise about disk\n" in checked.stdout
    program = site / "p.sh"
    program.write_text("echo hi")
    used = roll_env(
        site, "run", "--lang", "bash", "--minimum-level", "none", str(program), ROLLGYM_SANDBOX="borrowed"
    )
    assert (used.returncode, used.stdout) == (0, "hi\n"), used.stderr
    wrong = roll_env(site, "check", "borowed")
    assert (wrong.returncode, "there is no sandbox 'borowed'" in wrong.stderr) == (2, True)


class Boastful:
    """A back-end that claims what it does not keep, forgets files, and knows no end."""

    name = "boastful"

    def __init__(self) -> None:
        self._inner = make_sandbox("unsafe")

    def probe(self) -> Guarantees:
        return replace(self._inner.probe(), level="namespaces", files=True, network=True, processes=True)

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
    ) -> RunResult:
        source = program.source.replace("sleep 60", "sleep 0").replace("setsid", "nohup setsid")
        result = self._inner.run(replace(program, source=source), stdin=stdin, limits=limits)
        return replace(result, guarantees=None)

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        raise OSError("no sessions")

    def close(self) -> None:
        self._inner.close()


def test_the_suite_finds_what_a_back_end_does_not_do() -> None:
    sandbox: Sandbox = Boastful()
    found = {case: (verdict, detail) for case, verdict, detail in check_backend(sandbox)}
    sandbox.close()
    assert found["it keeps what it claims"] == (
        "fail",
        "promises that a program could break: expected [], not ['files', 'network', 'processes']",
    )
    assert found["the time limit ends a program and keeps what it wrote"] == (
        "fail",
        "the outcome must be time_limit, not ok",
    )
    assert found["a session answers until it is closed"] == ("fail", "OSError('no sessions')")
    assert found["only plain files are brought back"][0] == "fail"
    assert found["how a program ends is told"][0] == "fail"
    assert found["a cancelled run ends"][0] == "skip"
    assert found["output without end ends the run"] == ("pass", "")


def test_a_server_is_not_given_what_cannot_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgym.sandbox.selection.make_sandbox", lambda name: Boastful())
    with pytest.raises(SandboxUnavailableError, match="boastful cannot end a run that nobody waits for"):
        open_cancellable("namespaces")
    monkeypatch.undo()
    with pytest.raises(SandboxUnavailableError, match="there is no sandbox 'jail'"):
        open_cancellable("jail")
