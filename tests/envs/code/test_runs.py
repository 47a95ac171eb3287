"""Runs of a program on inputs, apart from what they come to: that none is left behind."""

import pytest

from rollgym.envs.code.answers import RequestAnswer
from rollgym.envs.code.runs import Runs
from rollgym.envs.code.sandboxes import GradingLimits
from rollgym.sandbox.core.base import SandboxSession
from tests.support.sandboxes import working_sandbox


class Remembering:
    """A sandbox that keeps what was opened in it."""

    def __init__(self) -> None:
        self._inner = working_sandbox()
        self.opened: list[SandboxSession] = []

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def open_session(self, *args, **options) -> SandboxSession:
        self.opened.append(self._inner.open_session(*args, **options))
        return self.opened[-1]


def test_a_judgement_that_fails_leaves_no_program_behind():
    sandbox = Remembering()

    def fails(number: int, answer: RequestAnswer) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runs(sandbox, GradingLimits(seconds=2)).programs("python", "print(input())", {0: "a", 1: "b"}, fails)
    (session,) = sandbox.opened
    try:
        assert not session.alive
    finally:
        session.close()
