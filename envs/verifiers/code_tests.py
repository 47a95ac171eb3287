"""CodeTests-v0: a program is scored by hidden tests, in a sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.code.bounds import Bounds
from envs.code.boxes import operator_sandbox
from envs.code.extraction import extract
from envs.code.faults import GraderFaultError
from envs.code.forms import read_item, read_question
from envs.code.grader import Grader
from envs.code.item import ItemError
from envs.code.tasks import TaskSource
from envs.code.verdicts import NOT_RUN, Checked
from envs.splits import checked_split
from envs.verifiers.base import Verdict, VerifierEnv
from sandbox.base import SandboxUnavailableError

SCORINGS = ("fraction", "all")


class CodeTestsEnv(VerifierEnv):
    """Programs, scored by tests that they never see.

    A task has the fields of a HumanEval, EvalPlus, MBPP, APPS, CodeContests, LiveCodeBench, KodCode or SandboxFusion
    item. The program is the last fenced block of a response, outside think tags.

    Args:
        scoring: `fraction` for the share of the tests that are passed, `all` for 1 if all of them are, and 0 otherwise.
        seconds: Processor time of one test; an item's own limit counts where it is longer.
        max_tests: Of an item with more tests, only the first so many count.
        split: Only tasks of this split, by content.
        data: A file of items, `.jsonl` or `.parquet`; only an operator sets it. Without it, problems of our own.
        render_mode: "ansi".

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "description": "Programs, scored by hidden tests in a sandbox.",
        "inline": False,
    }
    operator_kwargs: ClassVar[frozenset[str]] = frozenset({"data"})
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "scoring": {"enum": list(SCORINGS)},
            "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
            "max_tests": {"type": "integer", "minimum": 1, "maximum": 1000},
            "split": {"enum": ["train", "valid", "test", None]},
            "render_mode": {"enum": ["ansi", None]},
        },
    }

    def __init__(
        self,
        *,
        scoring: str = "fraction",
        seconds: float = 6.0,
        max_tests: int = 100,
        split: str | None = None,
        data: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, not {scoring!r}")
        if not 0 < seconds <= 60:
            raise ValueError(f"seconds must be above 0 and at most 60, not {seconds}")
        if not 1 <= max_tests <= 1000:
            raise ValueError(f"max_tests must be between 1 and 1000, not {max_tests}")
        self._scoring = scoring
        self._max_tests = max_tests
        self._bounds = Bounds(seconds=seconds)
        self._tasks = TaskSource(data, checked_split(split))
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
                self._grader = Grader(operator_sandbox(), self._bounds)
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
