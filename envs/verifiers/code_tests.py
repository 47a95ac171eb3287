"""CodeTests-v0: a program is scored by hidden tests, in a sandbox."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rollgym.envs.code.answers import NOT_RUN, Checked
from rollgym.envs.code.extraction import extract
from rollgym.envs.code.forms import read_item, read_question
from rollgym.envs.code.grader import Grader
from rollgym.envs.code.item import ItemError
from rollgym.envs.code.sandboxes import (
    GraderFaultError,
    GradingLimits,
    Scoring,
    TestSeconds,
    operator_sandbox,
)
from rollgym.envs.code.tasks import CodeTaskSource, TaskData
from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import TaskSplit, checked_split
from rollgym.envs.verifiers.base import Verdict, VerifierEnv
from rollgym.sandbox.core.base import SandboxUnavailableError


class CodeTestsEnv(VerifierEnv):
    """Programs, scored by tests that they never see.

    A task has the fields of a HumanEval, EvalPlus, MBPP, APPS, CodeContests, LiveCodeBench, KodCode or SandboxFusion
    item. The program is the last fenced block of a response, outside think tags.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "reply": {"language": "python"},
        "description": "Programs, scored by hidden tests in a sandbox.",
        "observation": "The problem.",
        "actions": "A response with a program in a fenced block.",
        "reward": "The share of the tests that are passed, or all or nothing with `scoring: all`.",
        "inline": False,
        "needs": "a sandbox",
        "example_reply": "```python\n{solution}\n```",
        "baselines": {"random": 0, "constant action": 0},
    }

    def __init__(
        self,
        *,
        scoring: Scoring = "fraction",
        seconds: TestSeconds = 6.0,
        max_tests: Annotated[
            int, Field(ge=1, le=1000, description="Of an item with more tests, only the first so many count.")
        ] = 100,
        split: TaskSplit = None,
        data: TaskData = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._scoring = scoring
        self._max_tests = max_tests
        self._limits = GradingLimits(seconds=seconds)
        self._tasks = CodeTaskSource(data, checked_split(split))
        self._grader: Grader | None = None

    def draw_task(self) -> Mapping[str, Any]:
        """Draw an item."""
        return self._tasks.draw(self.np_random)

    def checked_task(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an item that asks something, and whose tests can be read."""
        read_question(fields)
        return fields

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the problem, and the code that it begins with."""
        item = read_item(task)
        if not item.starter.strip():
            return item.question
        return f"{item.question}\n\nBegin with:\n\n```python\n{item.starter.rstrip()}\n```"

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Solve the programming problem in Python. Reply with the whole program, or the whole function, in one "
            "fenced block that begins with ```python; it is tested on inputs that you do not see."
        )

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Run the program of a response on the tests of an item."""
        try:
            item = read_item(task)
        except ItemError as error:
            return Verdict(0.0, "error", str(error))
        extracted = extract(response, item.language)
        if extracted is None:
            return Verdict(0.0, "unparsable", "there is no program in a fenced block in the response")
        try:
            if self._grader is None:
                self._grader = Grader(operator_sandbox(), self._limits)
            counted = range(min(item.tests, self._max_tests))
            checked = self._grader.grade(
                item, extracted.code, counted, to_first_failure=self._scoring == "all"
            )[: len(counted)]
        except (GraderFaultError, SandboxUnavailableError) as error:
            return Verdict(0.0, "error", str(error))
        ran = [each for each in checked if each.why != NOT_RUN]
        if not extracted.fenced and ran and all(each.unloadable for each in ran):
            return Verdict(0.0, "unparsable", f"the response is no program: {ran[0].why}")
        return verdict_of(checked, self._scoring)


def verdict_of(checked: Sequence[Checked], scoring: str) -> Verdict:
    """Return what a program is worth whose tests came out like this."""
    passed = sum(each.passed for each in checked)
    detail = f"{passed} of {len(checked)} tests passed"
    if passed == len(checked):
        return Verdict(1.0, "correct", detail)
    failed = [each for each in checked if not each.passed]
    first = min(failed, key=lambda each: each.why == NOT_RUN)
    if any(each.why == NOT_RUN for each in failed):
        detail += ", and the next failed"
    detail += f"; the first failure: {first.why}"
    if passed == 0 or scoring == "all":
        return Verdict(0.0, "wrong", detail)
    return Verdict(passed / len(checked), "partial", detail)
