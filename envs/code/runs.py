"""Runs of a program on inputs: they go in together, and the answers come out, each of a process of its own."""

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.envs.code.answers import (
    GIVEN_UP,
    LATE,
    NOT_ASKED,
    CallResult,
    RequestAnswer,
    read_answers,
    result_of,
)
from rollgym.envs.code.conversation import Lines, program
from rollgym.envs.code.inside import values
from rollgym.envs.code.item import sent_arguments
from rollgym.envs.code.sandboxes import Deadline, GraderFaultError, GradingLimits, raise_faults
from rollgym.sandbox.core.base import Language, Outcome, Program, RunResult, Sandbox
from rollgym.sandbox.core.limits import Limits

Units = Sequence[tuple[str, str]]
"""Sources that are loaded one after the other as one module, each with a file name."""
Calls = Mapping[int, tuple[str, Sequence[Any], Mapping[str, Any]]]
"""Calls by number: the function, positional arguments and others."""

Fails = Callable[[int, RequestAnswer], bool]
"""Tells that an answer, to the request of a number, fails its test."""

_OUTPUT_KB = 16 * 1024
_START_SECONDS = 5.0
_LEAST_SECONDS = 0.5


class Runs:
    """Runs a program under the same limits until a deadline.

    Args:
        sandbox: The sandbox that it runs in.
        grading: What it may use.
        late: How many tests of the program have run out of time before.
    """

    def __init__(self, sandbox: Sandbox, grading: GradingLimits, late: int = 0) -> None:
        self._sandbox = sandbox
        self._grading = grading
        self._late = late
        self._deadline = Deadline(grading.total_seconds)

    @property
    def test_seconds(self) -> float:
        """How long one test may take by the clock."""
        return self._grading.wall_seconds

    def limits(self, seconds: float | None = None) -> Limits:
        """Return limits of a run that takes as long as this, or as long as there is time."""
        left = max(_LEAST_SECONDS, self._deadline.left)
        return Limits(
            wall_seconds=left if seconds is None else min(left, seconds),
            memory_mb=self._grading.memory_mb,
            output_kb=_OUTPUT_KB,
        )

    def setup(self, units: Units, module: str) -> dict[str, Any]:
        """Return the first line for what runs the program."""
        return {
            "units": units,
            "module": module,
            "apart": True,
            **self._grading.times(hurried=self._late > 0),
            "hurried": self._grading.times(hurried=True),
            "late": self._late,
            "patience": self._grading.patience,
            "answer_bytes": values.MAX_CHARACTERS,
        }

    def calls(self, units: Units, calls: Calls, fails: Fails | None = None) -> dict[int, CallResult]:
        """Make calls; return what each came to, by number.

        Args:
            units: The program.
            calls: What is called.
            fails: Tells that an answer fails its test, after which no further call is made; None makes all of them.
        """
        asked = [
            {"call": name, "args": sent_arguments(args), "kwargs": values.plain(dict(kwargs))}
            for name, args, kwargs in calls.values()
        ]
        answers = self._ask(self.setup(units, "solution"), asked, _by_index(calls, fails))
        return {number: result_of(answer) for number, answer in zip(calls, answers, strict=True)}

    def programs(
        self, language: Language, code: str, inputs: Mapping[int, str], fails: Fails | None = None
    ) -> dict[int, RequestAnswer]:
        """Run a program that reads and writes on inputs; return what became of each, by number.

        Args:
            language: What it is written in.
            code: The program.
            inputs: What it reads.
            fails: Tells that an answer fails its test, after which it is run no more; None runs it on all inputs.
        """
        asked = [{"stdin": stdin} for stdin in inputs.values()]
        failing = _by_index(inputs, fails)
        if language == "python":
            answers = self._ask(self.setup([("program", code)], "__main__"), asked, failing)
        else:
            answers = self._one_by_one(language, code, list(inputs.values()), failing)
        return dict(zip(inputs, answers, strict=True))

    def _ask(
        self, setup: Mapping[str, Any], asked: Sequence[Mapping[str, Any]], fails: Fails | None
    ) -> list[RequestAnswer]:
        """Have a program answer requests, in an order that it cannot know."""
        if not asked:
            return []
        if self._deadline.left < _LEAST_SECONDS:
            return [GIVEN_UP] * len(asked)
        order = list(range(len(asked)))
        content = json.dumps([setup["units"], len(asked)]).encode()
        random.Random(hashlib.blake2b(content, digest_size=8).digest()).shuffle(order)
        requests = [{"id": number, "do": asked[number]} for number in order]
        limits = self.limits(_START_SECONDS + len(asked) * self._grading.wall_seconds)
        if fails is None or len(asked) == 1:
            answers = self._together(setup, requests, limits)
        else:
            answers = self._in_turn(setup, requests, limits, fails)
        self._late += sum(answer.status == LATE for answer in answers)
        return answers

    def _together(
        self, setup: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], limits: Limits
    ) -> list[RequestAnswer]:
        """Send all requests at once."""
        result = self._sandbox.run(program("candidate"), stdin=_lines(setup, *requests), limits=limits)
        raise_faults(result)
        if not result.stdout:
            self._see_that_it_works(setup, result)
        return read_answers(result.stdout, len(requests))

    def _in_turn(
        self,
        setup: Mapping[str, Any],
        requests: Sequence[Mapping[str, Any]],
        limits: Limits,
        fails: Fails,
    ) -> list[RequestAnswer]:
        """Send one request after the other, until an answer fails its test."""
        answers = [NOT_ASKED] * len(requests)
        heard = False
        session = self._sandbox.open_session(program("candidate"), limits=limits)
        try:
            lines = Lines(session, time.monotonic() + limits.wall_seconds)
            lines.send(setup)
            for request in requests:
                number = request["id"]
                said = lines.receive() if lines.send(request) else b""
                heard |= bool(said)
                answers[number] = read_answers(said, len(requests))[number]
                if fails(number, answers[number]):
                    break
        finally:
            result = session.close()
        raise_faults(result)
        if not heard:
            self._see_that_it_works(setup, result)
        return answers

    def _see_that_it_works(self, setup: Mapping[str, Any], silent: RunResult) -> None:
        """Tell a program that kept its server from answering from a sandbox in which nothing can answer.

        Raises:
            GraderFaultError: An empty program gets no answer either.
        """
        requests = {"id": 0, "do": {"call": "none", "args": []}}
        result = self._sandbox.run(
            program("candidate"),
            stdin=_lines({**setup, "units": []}, requests),
            limits=Limits(wall_seconds=_START_SECONDS, memory_mb=self._grading.memory_mb),
        )
        raise_faults(result)
        if read_answers(result.stdout, 1)[0].status != "answered":
            said = silent.detail or silent.stderr.decode(errors="replace")
            raise GraderFaultError(f"programs get no answer out of the sandbox: {said[-300:]}")

    def _one_by_one(
        self, language: Language, code: str, inputs: Sequence[str], fails: Fails | None
    ) -> list[RequestAnswer]:
        """Run a program in a language that has no server of ours: a sandbox for each input."""
        answers = [NOT_ASKED] * len(inputs)
        for index, stdin in enumerate(inputs):
            answers[index] = self._alone(language, code, stdin)
            self._late += answers[index].status == LATE
            if fails is not None and fails(index, answers[index]):
                break
        return answers

    def _alone(self, language: Language, code: str, stdin: str) -> RequestAnswer:
        if self._deadline.left < _LEAST_SECONDS or self._late >= self._grading.patience:
            return GIVEN_UP
        result = self._sandbox.run(
            Program(language, code),
            stdin=stdin.encode(errors="replace"),
            limits=self.limits(self._grading.times(hurried=self._late > 0)["wall_seconds"]),
        )
        raise_faults(result)
        if result.outcome is Outcome.TIME_LIMIT:
            return RequestAnswer(LATE)
        if result.stdout_truncated:
            return RequestAnswer("flooded")
        ended = -result.signal if result.signal is not None else result.exit_code
        return RequestAnswer(
            "ended",
            # A program that was not compiled, or that the sandbox ended, has no exit code.
            exit=1 if ended is None or result.outcome not in _FINISHED else ended,
            output=result.stdout.decode(errors="replace"),
            errors=result.stderr.decode(errors="replace") or result.detail,
        )


def _by_index(numbers: Mapping[int, Any], fails: Fails | None) -> Fails | None:
    """Return the same judgement for indices in a list instead of numbers."""
    if fails is None:
        return None
    known = list(numbers)
    return lambda index, answer: fails(known[index], answer)


_FINISHED = frozenset({Outcome.OK, Outcome.NON_ZERO_EXIT})


def _lines(*lines: Any) -> bytes:
    # Of the standard library: it knows numbers of any length.
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
