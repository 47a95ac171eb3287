"""Verifiers with one defect each. `Products` has none."""

import ast
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rollgym.clients.replies.marks import fenced_blocks
from rollgym.envs.verifiers.base import Verdict, VerifierEnv


class Products(VerifierEnv):
    """Reads the last number."""

    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        super().__init__()

    def draw_task(self) -> dict[str, Any]:
        one, other = (int(each) for each in self.np_random.integers(11, 99, 2))
        return {"question": f"{one} times {other}", "answer": str(one * other)}

    def checked_task(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return fields

    def prompt(self, task: Mapping[str, Any]) -> str:
        return f"What is {task['question']}?"

    def instruction(self) -> str:
        return "Reply with the number."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        found = re.findall(r"\d+", response)
        if not found:
            return Verdict(0.0, "unparsable", "no number")
        return self.verdict(found[-1] == task["answer"])

    def verdict(self, right: bool) -> Verdict:
        return Verdict(1.0, "correct", "") if right else Verdict(0.0, "wrong", "")


class TellsItsTask(Products):
    def _state(self) -> dict[str, Any]:
        return {"task": self.task}


class TellsItsAnswer(Products):
    """In words, of which no other check makes anything."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"meta": {"source": ["row", f"gold={self.task['answer']}; level 3"]}}


class PaysEcho(Products):
    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        return self.verdict(True) if task["question"] in response else super().score(response, task)


class PaysHedging(Products):
    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        return self.verdict(task["answer"] in re.findall(r"\d+", response))


class PaysSilence(Products):
    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        return self.verdict(not response.strip() or response.strip() == task["answer"])


class PaysAConstant(Products):
    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        return self.verdict(response.strip() in (task["answer"], "42"))


class BeyondOne(Products):
    def verdict(self, right: bool) -> Verdict:
        return Verdict(2.0, "correct", "") if right else Verdict(0.0, "wrong", "")


class CountsCalls(Products):
    """Every third response is let pass."""

    calls = 0

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        self.calls += 1
        return super().score(response, task) if self.calls % 5 else self.verdict(True)


class ForgetsRepeats(Products):
    """A response that came before is not paid again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        key = (response, task["question"])
        if key in self.seen:
            return self.verdict(False)
        self.seen.add(key)
        return super().score(response, task)


class PaysTheWrong(Products):
    """The outcome and the score disagree."""

    def verdict(self, right: bool) -> Verdict:
        return super().verdict(right) if right else Verdict(0.3, "wrong", "")


class AnswerInThePrompt(Products):
    def prompt(self, task: Mapping[str, Any]) -> str:
        return f"{super().prompt(task)} (reference: {task['answer']})"


class Functions(Products):
    """Wants a function in the last fence, and does not mind others beside it: nothing is wrong with that."""

    def draw_task(self) -> dict[str, Any]:
        one, other = (int(each) for each in self.np_random.integers(11, 99, 2))
        answer = f"def times_{one}():\n    return {one * other}\n"
        return {"question": f"times_{one}, which returns {one} times {other}", "answer": answer}

    def prompt(self, task: Mapping[str, Any]) -> str:
        return f"Write {task['question']}."

    def instruction(self) -> str:
        return "Reply with the function in a fence."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        programs = [code for _, code in fenced_blocks(response)] or [response]
        return self.verdict(any(_holds(task["answer"], code) for code in self.read(programs)))

    def read(self, programs: list[str]) -> list[str]:
        return programs[-1:]


class PaysAnyFence(Functions):
    def read(self, programs: list[str]) -> list[str]:
        return programs


def _holds(function: str, program: str) -> bool:
    try:
        defined = ast.parse(program).body
    except (SyntaxError, ValueError):
        return False
    return any(ast.unparse(each).strip() == function.strip() for each in defined)
