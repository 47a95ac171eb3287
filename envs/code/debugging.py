"""Code-v0: one problem and several tries; the tests that may be seen say what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rollgym.envs.code.answers import NOT_RUN, Checked
from rollgym.envs.code.extraction import extract
from rollgym.envs.code.forms import read_question
from rollgym.envs.code.grader import Grader
from rollgym.envs.code.item import Item
from rollgym.envs.code.sandboxes import GradingLimits, Scoring, TestSeconds, operator_sandbox
from rollgym.envs.code.tasks import CodeTaskSource, TaskData
from rollgym.envs.code.turns import ReplyTurn, TurnEnv, cut
from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import TaskSplit, checked_split

_SHOWN_CHARACTERS = 400
_TOTAL_SECONDS = 20.0
_SOLUTIONS = ("solution", "canonical_solution", "code")


class CodeEnv(TurnEnv):
    """A programming problem. Each turn takes a program and shows how it does on the tests that may be seen.

    The episode ends with a program that passes these, or with the last turn; the hidden tests then decide. Tests of an
    item are hidden unless it publishes them; without such, the first is seen.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TurnEnv.metadata | {
        "reply": {"language": "python"},
        "description": "A programming problem, with several tries and tests that say what is wrong.",
        "observation": "The problem; then how the program did on the tests that may be seen.",
        "actions": "A program in a fenced block.",
        "reward": (
            "At the end the share of the hidden tests that are passed, or all or nothing with "
            "`scoring: all`; `turn_penalty` for each turn after the first."
        ),
        # Chance is fixed in programs that are graded, and nothing that is shown has to do with time.
        "deterministic": True,
        "forkable": True,
        "max_episode_steps": 4,
        "needs": "a sandbox",
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }

    def __init__(
        self,
        *,
        max_turns: Annotated[int, Field(ge=1, le=100, description="Programs that may be sent.")] = 4,
        scoring: Scoring = "fraction",
        turn_penalty: Annotated[
            float, Field(description="Added to the reward of each turn after the first.")
        ] = 0.0,
        format_penalty: Annotated[
            float, Field(description="Added to the reward of a reply without a program.")
        ] = 0.0,
        seconds: TestSeconds = 6.0,
        split: TaskSplit = None,
        data: TaskData = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(max_turns=max_turns, format_penalty=format_penalty, render_mode=render_mode)
        self._scoring = scoring
        self._turn_penalty = float(turn_penalty)
        # A turn runs the visible tests and then the hidden ones, and is to end within a server's step.
        self._grading_limits = GradingLimits(seconds=seconds, total_seconds=_TOTAL_SECONDS)
        self._tasks = CodeTaskSource(data, checked_split(split))
        self._grader: Grader | None = None
        self._fields: Mapping[str, Any] = {}
        self._item = Item(form="", question="")
        self._seen_passed = 0

    def _begin(self, options: Mapping[str, Any]) -> str:
        given = dict(options)
        split = checked_split(given.pop("split", None))
        self._fields = given or self._tasks.draw(self.np_random, split)
        self._item = read_question(self._fields)
        self._seen_passed = 0
        starter = self._item.starter.strip()
        begin = f"\n\nBegin with:\n\n```python\n{starter}\n```" if starter else ""
        return f"{self._item.question}{begin}"

    def _instruction(self) -> str:
        return (
            "Solve the programming problem in Python. Reply with the whole program, or the whole function, in one "
            f"fenced block that begins with ```python. It is tested at once, and you have {self._limit} tries; hidden "
            "tests decide in the end."
        )

    def _take(self, reply: str, *, last: bool) -> ReplyTurn:
        extracted = extract(reply, self._item.language)
        penalty = self._turn_penalty if self._turns > 1 else 0.0
        if extracted is None or not extracted.fenced:
            note = "There is no program in your reply: put it in one fenced block that begins with ```python."
            return ReplyTurn(note, penalty, valid=False)
        if self._grader is None:
            self._grader = Grader(operator_sandbox(), self._grading_limits)
        shown, hidden = self._parts()
        seen = self._grader.grade(self._item, extracted.code, shown)
        self._seen_passed = sum(seen[number].passed for number in shown)
        passes = self._seen_passed == len(shown)
        text = self._feedback(shown, seen)
        if not passes and not last:
            return ReplyTurn(text, penalty)
        checked = self._grader.grade(
            self._item,
            extracted.code,
            hidden,
            to_first_failure=self._scoring == "all",
            late=sum(each.late for each in seen),
        )
        passed = sum(checked[number].passed for number in hidden)
        success = passes and passed == len(hidden)
        score = passed / len(hidden) if self._scoring == "fraction" else float(success)
        stopped = any(checked[number].why == NOT_RUN for number in hidden)
        text += "\nA hidden test failed." if stopped else f"\n{passed} of {len(hidden)} hidden tests passed."
        return ReplyTurn(text, score + penalty, terminated=passes, success=success)

    def _parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of the tests that may be seen, and of those that decide."""
        count = self._item.visible
        every = range(self._item.tests)
        return every[:count], every[count:] or every

    def _feedback(self, shown: Sequence[int], seen: Sequence[Checked]) -> str:
        lines = (
            [f"{self._seen_passed} of {len(shown)} visible tests passed."]
            if shown
            else ["The program was taken."]
        )
        for number in shown:
            if not seen[number].passed:
                lines += [
                    f"Test {number + 1} failed: {seen[number].why}",
                    *self._details(number, seen[number]),
                ]
        return "\n".join(lines)

    def _details(self, number: int, checked: Checked) -> list[str]:
        parts: list[tuple[str, str]] = []
        if self._item.calls:
            call = self._item.calls[number]
            arguments = ", ".join(repr(each) for each in call.args)
            parts = [("call", f"{call.name}({arguments})"), ("expected", repr(call.accepted[-1]))]
        elif self._item.streams:
            stream = self._item.streams[number]
            parts = [("input", stream.stdin.rstrip("\n")), ("expected", stream.accepted[0].rstrip("\n"))]
        elif self._item.reference is not None:
            reference = self._item.reference
            arguments = ", ".join(repr(each) for each in reference.inputs[number])
            parts = [("call", f"{reference.name}({arguments})")]
        elif self._item.suite is not None and number == 0:
            parts = [("test", self._item.suite.first)]
        if checked.answer:
            parts.append(("got", checked.answer.rstrip("\n")))
        return [f"  {name}: {cut(text, _SHOWN_CHARACTERS)}" for name, text in parts]

    def _state(self) -> dict[str, Any]:
        return {
            "question": self._item.question,
            "turn": self._turns,
            "visible_tests_passed": self._seen_passed,
        }

    def _expert_action(self) -> str | None:
        known = (self._fields.get(name) for name in _SOLUTIONS)
        solution = next((each for each in known if isinstance(each, str) and each), None)
        return None if solution is None else f"```python\n{solution.rstrip()}\n```"

    def _optimal_steps(self) -> int:
        return 1
