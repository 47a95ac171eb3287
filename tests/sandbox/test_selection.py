"""No back-end takes the place of a stronger one unless it was allowed to."""

import sys
from dataclasses import replace

import pytest

from rollgym.sandbox.core.base import Outcome, Program, SandboxUnavailableError
from rollgym.sandbox.core.kinds import BY_NAME
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.local.backends import NamespaceSandbox
from rollgym.sandbox.selection import make_sandbox, open_sandbox, survey


def test_the_best_one_is_opened_and_is_never_the_unsafe_one() -> None:
    try:
        sandbox = open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    assert sandbox.probe().level != "none"
    sandbox.close()


def test_the_unsafe_one_is_opened_by_name_and_promises_nothing() -> None:
    sandbox = open_sandbox("unsafe")
    seen = sandbox.probe()
    assert seen.level == "none"
    assert not any((seen.files, seen.network, seen.processes, seen.privileges, seen.system_calls, seen.disk))
    result = sandbox.run(Program("bash", "sleep 60"), limits=Limits(wall_seconds=0.2))
    assert result.outcome is Outcome.TIME_LIMIT
    sandbox.close()


def test_a_named_one_below_the_level_is_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match="landlock"):
        open_sandbox("landlock", minimum_level="namespaces")


def test_unknown_names_and_levels_are_errors() -> None:
    with pytest.raises(ValueError, match="namespaces"):
        make_sandbox("jail")
    with pytest.raises(ValueError, match="landlock"):
        open_sandbox(minimum_level="high")  # type: ignore[arg-type]


def test_a_back_end_that_cannot_work_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(SandboxUnavailableError, match="needs Linux"):
        open_sandbox("namespaces")
    with pytest.raises(
        SandboxUnavailableError, match=r"(?s)no sandbox of level namespaces.*namespaces needs Linux"
    ):
        open_sandbox(minimum_level="namespaces")


def test_a_broken_promise_takes_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe believes what its program could do, not what the class says."""
    sandbox = make_sandbox("unsafe")
    monkeypatch.setattr(sandbox, "claims", replace(NamespaceSandbox.claims, disk=False), raising=False)
    seen = sandbox.probe()
    assert seen.level == "none"
    assert not seen.files
    assert not seen.network
    assert not seen.processes
    sandbox.close()


def test_the_survey_has_every_back_end_once() -> None:
    assert [name for name, _ in survey()] == [name for name in BY_NAME if name != "remote"]
