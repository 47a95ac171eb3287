"""Tests that are run: in a sandbox of their own, with the program in another one, and us in between.

What runs in the sandboxes are modules of `rollgym.envs.code.inside`, sent as one text (`program`).
"""

import json
import math
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from types import TracebackType
from typing import Any, Self

import orjson

from rollgym.envs.code.answers import LATE, MISSING, NOT_RUN, Checked, read_answers, whole_characters
from rollgym.envs.code.inside import values
from rollgym.envs.code.inside.tested_program import NO_ANSWER, UNLOADABLE
from rollgym.envs.code.sandboxes import GraderFaultError, raise_faults
from rollgym.envs.code.suites import Script, Suite
from rollgym.sandbox.core.base import Program, Sandbox, SandboxSession
from rollgym.sandbox.core.limits import Limits

_PACKAGES = ("rollgym", "rollgym.envs", "rollgym.envs.code", "rollgym.envs.code.inside")
_NEEDED = {
    "candidate": ("values", "objects"),
    "checker": ("values", "objects", "proxies", "tested_program", "pytest_stand_in"),
    "shell": (),
}
_BEGINNING = """import sys as _sys
import types as _types


def _add(name, source):
    module = _types.ModuleType(name)
    _sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(_sys.modules[parent], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


"""


_LONGEST_LINE = 2 * values.MAX_CHARACTERS
_EVALUATION = Limits(wall_seconds=20.0, output_kb=16 * 1024)
_MARGIN_SECONDS = 5.0
_LATE = f"{NO_ANSWER} ({LATE})"


class Lines:
    """A session that is spoken to in lines.

    Args:
        session: The session.
        deadline: When to give up, on the monotonic clock.
    """

    def __init__(self, session: SandboxSession, deadline: float) -> None:
        self._session = session
        self._deadline = deadline
        self._held = bytearray()

    def send(self, data: Any) -> bool:
        """Send a line; return whether the other side could take it."""
        try:
            self._session.write(json.dumps(data).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, until: float = math.inf) -> bytes:
        """Return the next line; nothing if there is none to come, or none by then."""
        while b"\n" not in self._held:
            left = min(self._deadline, until) - time.monotonic()
            part = self._session.read(left) if left > 0 else b""
            if not part or len(self._held) > _LONGEST_LINE:
                return b""
            self._held += part
        line, _, rest = bytes(self._held).partition(b"\n")
        self._held = bytearray(rest)
        return line


class SuiteConversation:
    """A program and its tests, each in a sandbox of its own.

    Args:
        sandbox: Where both run.
        limits: Of each of them.

    Attributes:
        rest: What became of cases that have not been reported.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._deadline = time.monotonic() + limits.wall_seconds
        self._sessions: list[SandboxSession] = []
        self.rest = Checked(False, "the test was not run")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        results = [session.close() for session in self._sessions]
        if error is None:
            for result in results:
                raise_faults(result)

    def hold(
        self,
        script: Script,
        suite: Suite,
        setup: Mapping[str, Any],
        *,
        test_seconds: float,
        to_first_failure: bool = False,
    ) -> dict[int, Checked]:
        """Run tests; return what became of their cases, by number.

        Args:
            script: The tests.
            suite: Of which they are.
            setup: The first line for what runs the program.
            test_seconds: How long a test may take by the clock with all that it asks: one may ask in a loop that only
                the program ends. With the first that takes longer, all ends.
            to_first_failure: Run no further case once one is failed.

        Raises:
            GraderFaultError: The tests cannot be run here.
        """
        checker = self._start("checker", _orders(script, suite), _MARGIN_SECONDS)
        candidate = self._start("candidate", setup, 0.0)
        reports: dict[int, Checked] = {}
        asked = 0
        until = self._until(test_seconds)
        while line := checker.receive(until):
            told = values.read_json(line)
            if "ask" in told:
                answer = self._pass_on(candidate, told["ask"], asked)
                asked += 1
                if not checker.send(answer):
                    break
            elif "broken" in told:
                why = whole_characters(str(told["broken"]))
                if not told.get("by_program"):
                    raise GraderFaultError(f"the item's tests cannot be run: {why}")
                self.rest = Checked(False, why, unloadable=UNLOADABLE in why)
                return reports
            elif "unsupported" in told:
                why = whole_characters(str(told["unsupported"]))
                raise GraderFaultError(f"the item's tests cannot be run: {why}")
            elif "case" in told:
                why = whole_characters(str(told.get("why", "")))
                checked = Checked(
                    told["passed"] is True, why, unloadable=UNLOADABLE in why, late=_LATE in why
                )
                reports[told["case"]] = checked
                until = self._until(test_seconds)
                if to_first_failure and not checked.passed:
                    self.rest = Checked(False, NOT_RUN)
                    return reports
            elif "again" in told:
                until = self._until(test_seconds)
            else:
                return reports
        if time.monotonic() > until:
            self.rest = Checked(False, "the time was over", late=True)
        return reports

    def _until(self, seconds: float) -> float:
        return time.monotonic() + seconds + _MARGIN_SECONDS

    def _start(self, name: str, setup: Mapping[str, Any], margin: float) -> Lines:
        limits = self._limits
        session = self._sandbox.open_session(program(name), limits=limits)
        self._sessions.append(session)
        lines = Lines(session, self._deadline + margin)
        lines.send(setup)
        return lines

    def _pass_on(self, candidate: Lines, request: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Ask the program on behalf of its tests. What it writes is read here, and written again."""
        if not candidate.send({**request, "id": number}):
            return {"status": "gone"}
        while line := candidate.receive():
            answer = read_answers(line, number + 1)[number]
            if answer is not MISSING:
                return {"status": answer.status, "reply": answer.reply}
        return {"status": "gone"}


def evaluate_pairs(sandbox: Sandbox, suite: Suite) -> dict[int, list[Any]]:
    """Return the arguments and expected values of pairs as they are written, by number, without any program.

    Raises:
        GraderFaultError: The sandbox failed.
    """
    text = json.dumps(_orders(suite.evaluation(), suite)).encode() + b"\n"
    result = sandbox.run(program("checker"), stdin=text, limits=_EVALUATION)
    raise_faults(result)
    found: dict[int, list[Any]] = {}
    for line in result.stdout.splitlines():
        told = values.read_json(line)
        if "pair" in told:
            found[told["pair"]] = told["values"]
    return found


def _orders(script: Script, suite: Suite) -> dict[str, Any]:
    return {
        "before": script.before,
        "names": script.names,
        "units": script.units,
        "functions": script.functions,
        "shared": suite.shared,
        "classes": sorted(suite.classes),
        "allows_nan": suite.mentions_nan,
    }


_LONGEST_SESSION = 6 * 3600.0


class SandboxEndedError(Exception):
    """What was run in a session has ended the sandbox that it ran in, or keeps it from answering."""


class ProgramSession:
    """One of our own programs in a sandbox, from the first turn of an episode to its last.

    Args:
        sandbox: The sandbox that it runs in.
        name: The module of `rollgym.envs.code.inside`.
        files: Laid into its working directory.
        memory_mb: MiB of all that runs in it.
    """

    def __init__(self, sandbox: Sandbox, name: str, files: Mapping[str, bytes], memory_mb: int) -> None:
        # A policy may think for long between two turns.
        limits = Limits(wall_seconds=_LONGEST_SESSION, memory_mb=memory_mb, output_kb=64 * 1024)
        self._session = sandbox.open_session(program(name), files=files, limits=limits)

    def tell(self, data: Mapping[str, Any]) -> None:
        """Send a line that has no answer.

        Raises:
            GraderFaultError: The sandbox is gone.
        """
        if not Lines(self._session, 0.0).send(data):
            raise GraderFaultError(f"the sandbox session has not begun: {self._gone()}")

    def ask(self, data: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a line and return what is answered.

        Raises:
            SandboxEndedError: What was run has ended the sandbox, and so did not answer.
            GraderFaultError: The sandbox failed.
        """
        lines = Lines(self._session, time.monotonic() + seconds)
        line = lines.receive() if lines.send(data) else b""
        try:
            answer = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._gone() from None
        if not isinstance(answer, dict):
            raise self._gone()
        return answer

    def close(self) -> None:
        """End all that runs in it."""
        self._session.close()

    def _gone(self) -> SandboxEndedError:
        result = self._session.close()
        raise_faults(result)
        return SandboxEndedError(f"{result.outcome.value}: {result.detail}")


@cache
def program(name: str) -> Program:
    """Return a module of `rollgym.envs.code.inside`, with those that it uses, as a program that runs its `main`."""
    lines = [f"_add({package!r}, '').__path__ = []" for package in _PACKAGES]
    lines += [f"_add({f'{_PACKAGES[-1]}.{each}'!r}, {_source(each)!r})" for each in (*_NEEDED[name], name)]
    lines.append(f"_sys.modules[{f'{_PACKAGES[-1]}.{name}'!r}].main()")
    return Program("python", _BEGINNING + "\n".join(lines) + "\n")


def _source(name: str) -> str:
    package = import_module(_PACKAGES[-1])
    return resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
