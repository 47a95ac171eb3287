"""Arithmetic-v0: generated sums with exact answers."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from rollgym.clients.replies.marks import ANSWER_WITHIN, boxes, last_tagged
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict

_MINUS = str.maketrans(dict.fromkeys("−–‐‑—﹣－", "-") | {"\N{NO-BREAK SPACE}": " "})
_INTEGER = re.compile(r"[-+]?(?<![\d.])\d+(?:[,_ ]\d{3})*(?!\.?\d)")
_NEGATIVE = re.compile(r"\b(?:minus|negative)\s+(?=\d)", re.IGNORECASE)
# A sign with a blank behind it, where nothing stands before it that it could be taken from.
_SIGN_APART = re.compile(r"(\A\s*|[=:]\s*|\b(?:is|are|equals)\s+)([-+])[ \t]+(?=\d)")
# What makes another number of the digits before it; an exclamation mark ends a sentence, and is a factorial elsewhere.
_MADE_ANOTHER = re.compile(
    r"[²³⁰¹⁴-⁹½¼¾^°′?\w]|\s?(?:\\?%|‰|percent\b|(?:\*\*?|[/×÷!])\s*[\d(!]|\+\s*(?:[a-zA-Z(]|\Z))"
    r"|\.\.|\s(?:dozen|hundred|thousand|million|billion)|[)\]}]{1,3}\s?[!^]|\W{0,4}(?:is\s+)?(?:wrong|incorrect)\b"
)
_PART_OF_ANOTHER = re.compile(r"(?:[A-Za-z_^√±]|\d[/*^×÷.]\s?|[\d)]\s*[/*^×÷]\s*|-\s*[(\[{\n]\s*)\Z")
_TAKEN_FROM = re.compile(r"[\d)]\s*\Z")
_DENIED = re.compile(
    r"(?:\d\s*(?:[,;|]|\b(?:or|to)\b)|\b(?:not|never|than|least|most|except|isn't|about|between(?:\s+\S{1,12}\s+and)?)|[≠<>≤≥~≈]|!=)(?:\s+(?:equal\s+to|be|an?))?\s*\Z",
    re.IGNORECASE,
)
_NEAR = 24
_QUESTION = re.compile(r"\d{1,9}(?: [-+*] \d{1,9}){1,15}")
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LONGEST_NUMBER = 400
_SHOWN = 80


class ArithmeticEnv(GeneratingVerifier):
    """Sums, differences and products of whole numbers.

    A response is read outside think tags: the last `<answer>`, else the last box, else the last whole number.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Generated sums, differences and products with exact answers.",
        "observation": "The sum: `85 - 63 = ?`.",
        "actions": "A response with the number in answer tags, in a box, or as its last number.",
        "reward": "1 where the number is right, else 0.",
        "example_reply": "<answer>{answer}</answer>",
        "baselines": {"random": 0.01, "constant action": 0, "echo": 0.02, "blind": 0},
    }

    def __init__(
        self,
        *,
        terms: Annotated[int, Field(ge=2, le=16, description="Numbers in a question.")] = 2,
        digits: Annotated[int, Field(ge=1, le=9, description="Most digits of a number.")] = 2,
        operators: Annotated[
            str, Field(pattern="^[-+*]+$", description="Which of `+`, `-` and `*` occur.")
        ] = "+-",
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        self._terms = terms
        self._digits = digits
        self._operators = operators

    def generate_task(self) -> dict[str, Any]:
        """Draw a question and its answer."""
        numbers = self.np_random.integers(0, 10**self._digits, self._terms).tolist()
        chosen = self.np_random.integers(len(self._operators), size=self._terms - 1).tolist()
        question = str(numbers[0])
        for index, number in zip(chosen, numbers[1:], strict=True):
            question += f" {self._operators[index]} {number}"
        return {"question": question, "answer": str(value_of_question(question))}

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a question with its answer, which is computed if it is not given."""
        question = fields.get("question")
        if not isinstance(question, str):
            raise ValueError("a task needs the field 'question', such as '12 + 7'")
        return {"question": question, "answer": str(_expected(fields))}

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the question."""
        return f"{task['question']} = ?"

    def instruction(self) -> str:
        """Return how to answer."""
        return "Work out the sum. Reply with the number in answer tags, for example <answer>12</answer>."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Compare the number that a response names with the task's answer, exactly."""
        try:
            expected = _expected(task)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        read = number_given(response)
        if read is None:
            return Verdict(0.0, "unparsable", "no whole number was found in the response")
        if read == expected:
            return Verdict(1.0, "correct", f"{read}")
        return Verdict(0.0, "wrong", f"{read}, expected {expected}")


def _expected(task: Mapping[str, Any]) -> int:
    """Return the answer of a task, which is computed if it is not given.

    Raises:
        ValueError: It is not a whole number, or there is nothing to compute it from.
    """
    answer, question = task.get("answer"), task.get("question")
    if answer is None and question is None:
        raise ValueError("the item has neither a question nor an answer")
    expected = value_of_question(str(question)) if answer is None else _whole_number(str(answer))
    if expected is None:
        raise ValueError(f"the task's answer {str(answer)[:_SHOWN]!r} is no whole number")
    return expected


def number_given(response: str) -> int | None:
    """Return the number that a response gives as its answer; None if it gives none."""
    said = strip_thinking(response, ANSWER_WITHIN)
    marked = last_tagged(said, "answer")
    if marked is None and (found := boxes(said)[0]):
        marked = found[-1].content
    if marked is not None:
        within = boxes(marked)[0]
        return _whole_number(within[-1].content if within else marked)
    return _last_number(_SIGN_APART.sub(r"\1\2", _NEGATIVE.sub("-", said.translate(_MINUS))))


def _last_number(said: str) -> int | None:
    """Return the last number of a text; None if it is part of another, such as `12%`, or denied, as in `not 12`."""
    last = None
    for match in _INTEGER.finditer(said):
        last = match
    if last is None or _MADE_ANOTHER.match(said, last.end()) is not None:
        return None
    if said[last.end() : last.end() + 2].strip()[:1] == "!" and not any(map(str.isalpha, said)):
        return None
    before = said[max(0, last.start() - _NEAR) : last.start()]
    if last[0][0] in "+-" and _TAKEN_FROM.search(before) is not None:
        return None
    if _PART_OF_ANOTHER.search(before) is not None or _DENIED.search(before) is not None:
        return None
    return _whole_number(last[0])


def value_of_question(question: str) -> int:
    """Return the value of a question such as `12 + 7 * 3`; products bind tighter.

    Raises:
        ValueError: If the question is not of that form.
    """
    if not _QUESTION.fullmatch(question):
        raise ValueError(
            f"'{question[:_SHOWN]}' is no question such as '12 + 7': 2 to 16 numbers with +, - or * between"
        )
    # Python has no leading zeros, and nothing but numbers and operators is left to parse.
    plain = re.sub(r"\b0+(?=\d)", "", question)
    return _value(ast.parse(plain, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


def _whole_number(text: str) -> int | None:
    plain = _NEGATIVE.sub("-", text.translate(_MINUS)).strip().strip("$.").strip()
    plain = _SIGN_APART.sub(r"\1\2", plain)
    match = _INTEGER.fullmatch(plain)
    if match is None or len(plain) > _LONGEST_NUMBER:
        return None
    return int(re.sub(r"[,_ ]", "", plain))
