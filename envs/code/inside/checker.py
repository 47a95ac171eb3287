"""Runs tests that cannot be expressed as inputs and expected values, away from the program that they test.

Names of the program stand for calls that leave this process as values and come back as values. The cases report by a
copy of the standard output, so that nothing that a test prints is taken for a report.
"""

import json
import os
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.envs.code.inside import proxies, pytest_stand_in, values
from rollgym.envs.code.inside.tested_program import ProgramUnderTest

_MOST_DIGITS = 100_000


class Line:
    """The way to the program: one request, one answer.

    Args:
        source: Where answers come from.
        channel: Where requests and reports go.
    """

    def __init__(self, source: int, channel: int) -> None:
        self._lines = open(source, "rb", closefd=False)  # noqa: SIM115
        self._channel = channel
        self.setup: dict[str, Any] = json.loads(self._lines.readline())

    def ask(self, child: int | None, do: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the program for something."""
        self.tell({"ask": {"id": 0, "child": child, "do": do}})
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def tell(self, report: Mapping[str, Any]) -> None:
        """Report."""
        data = json.dumps(report).encode() + b"\n"
        while data:
            data = data[os.write(self._channel, data) :]


class Case:
    """One case of the tests: what is raised in it is its own failure, and no other's.

    Args:
        number: Of the case.
        reporter: Called with how it ended.
        program: What is tested.
        alone: Whether it must ask the program itself, and not build on what earlier cases have asked.
    """

    def __init__(
        self,
        number: int,
        reporter: Callable[[Mapping[str, Any]], None],
        program: ProgramUnderTest,
        *,
        alone: bool = False,
    ) -> None:
        self._number = number
        self._tell = reporter
        self._program = program
        self._alone = alone

    def __enter__(self) -> "Case":
        self._program.begin()
        return self

    def again(self) -> None:
        """Continue with the program as it was at first."""
        self._tell({"again": self._number})
        self._program.let_go()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        failure = self._program.end()
        asked = self._program.asked
        says_something = asked.in_case + asked.outside if self._alone else asked.ever
        if isinstance(error, proxies.UnsupportedError):
            self._tell({"case": self._number, "unsupported": str(error)[:300]})
        elif isinstance(error, unittest.SkipTest) and not failure and not says_something:
            # Where the program was asked before, it has brought that about, and has not passed.
            self._tell({"case": self._number, "unsupported": f"a test is skipped: {str(error)[:200]}"})
        elif failure or error is not None:
            why = failure or f"{type(error).__name__}: {str(error)[:200]}"
            self._tell({"case": self._number, "passed": False, "why": why})
        elif not says_something:
            self._tell({"case": self._number, "unsupported": "a test asks nothing of the program"})
        else:
            self._tell({"case": self._number, "passed": True})
        return True


def main() -> None:
    """Run the tests that the first line of the input holds."""
    # As for the program, but its answers must not cost the tests their time.
    sys.set_int_max_str_digits(_MOST_DIGITS)
    source, channel = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    line = Line(source, channel)
    settings = {name: line.setup[name] for name in ("shared", "classes", "allows_nan")}
    program = ProgramUnderTest(line.ask, **settings)
    try:
        _run(line, program)
    except BaseException as error:  # noqa: BLE001 - tests are others' code
        why = f"{type(error).__name__}: {str(error)[:300]}"
        line.tell({"broken": why, "by_program": program.has_raised or program.asked.ever > 0})
    line.tell({"finished": True})


def _run(line: Line, program: ProgramUnderTest) -> None:
    setup = line.setup
    space = types.ModuleType("tests")
    sys.modules["tests"] = space
    sys.modules["solution"] = proxies.SolutionModule(program)
    sys.modules["pytest"] = pytest_stand_in.module()
    names = space.__dict__
    names["__case__"] = lambda number: Case(number, line.tell, program)
    names["__pair__"] = lambda number, args, kwargs, expected: _tell_pair(
        line, number, args, kwargs, expected
    )
    names |= proxies.stand_in_names()
    for file, text in setup["before"]:
        exec(proxies.compiled(file, text), names)
    for name in setup["names"]:
        kind = proxies.Class if name in setup["classes"] else proxies.Function
        names[name] = kind(program, name)
    for file, text in setup["units"]:
        exec(proxies.compiled(file, text), names)
    for number, name in setup["functions"]:
        pytest_stand_in.run(names, name, Case(number, line.tell, program, alone=True))


def _tell_pair(line: Line, number: int, args: Any, kwargs: Any, expected: Any) -> None:
    try:
        pair = [values.plain(list(args)), values.plain(kwargs), values.plain(expected)]
    except values.ValueRefusedError:
        # It stays a case that is run here.
        return
    line.tell({"pair": number, "values": pair})
