"""Math-v0: a response's answer against a reference, exactly where arithmetic decides and by Math-Verify elsewhere.

Without a data set, questions are drawn here, small ones of several kinds.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Annotated, Any, Literal, cast

from numpy.random import Generator
from pydantic import Field

from rollgym.envs.core.kwargs import OPERATOR, OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.answers import both_signs
from rollgym.envs.verifiers.arguments import is_reference
from rollgym.envs.verifiers.base import GeneratingVerifier, Outcome, Verdict, shortened
from rollgym.envs.verifiers.comparison import (
    UNDECIDED,
    Comparison,
    QuestionContext,
    asked_of,
    compare,
    is_exact,
)
from rollgym.envs.verifiers.extraction import (
    FoundAnswer,
    box_count,
    inside_dollars,
    is_denied_behind,
    last_box,
    last_formula_or_number,
    last_phrase,
    marked_answer,
    numbers_in,
    without_formulas,
    without_thoughts,
)
from rollgym.envs.verifiers.latex import typeset, unwrapped, without_lead_in
from rollgym.envs.verifiers.symbolic import Judgement, SymbolicComparison
from rollgym.envs.verifiers.units import unit_of
from rollgym.extras import install_line

KINDS = ("fractions", "equation", "percentage", "root", "points", "divisors")
"""The kinds of questions."""

_LONGEST_WHOLE = 200
# Where Math-Verify looks for LaTeX: an escaped dollar is a currency, and it reads no half matrices.
_ANCHOR = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
_CURRENCY = "\\$"
_VICINITY = 200
_MOST_TIMEOUTS = 2
_REFERENCE_MARK = re.compile(r"####\s*(.+)\s*\Z", re.DOTALL)
_WORD = re.compile(r"[a-zA-Z]{3,}")
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}[\s:]")
# What is said of a number that is not the answer itself.
_RELATED = re.compile(
    r"(?:\b(?:(?:more|less|fewer|greater|larger|smaller|higher|lower|other|rather)\s+than|at\s+(?:least|most)|up\s+to|not"
    r"|never|neither|nor|cannot|except|unless|between|anything\s+but)|n't)(?:\s+\w+){0,2}\s*\W?$"
    r"|\b(?:above|below|over|under)\s*\W?$",
    re.IGNORECASE,
)
_UNIT_AT_END = re.compile(r"[ \u00a0]{0,3}(?P<unit>[^\d\W][\w/^²³]{0,30}|[°€£¥¢][CF]?)[.!\s]{0,8}\Z")
_CLAUSE = re.compile(r"[,;:]|(?<!anything )\bbut\b", re.IGNORECASE)
_FUNCTION = re.compile(r"\\[a-zA-Z]|\b(?:sin|cos|tan|log|ln|exp|sqrt|mod)\b")

# Which of several verdicts counts where any of several references will do: the best of what was decided; a fault of
# ours counts before a wrong answer, since the reference that failed could have been the one.
_RANK: Mapping[Outcome, int] = {
    "correct": 5,
    "partial": 4,
    "timeout": 3,
    "error": 2,
    "wrong": 1,
    "unparsable": 0,
}


_SAID: Mapping[Judgement, tuple[Outcome, str]] = {
    "equal": ("correct", "math_verify"),
    "different": ("wrong", "math_verify"),
    "unreadable_answer": ("unparsable", "unreadable_answer"),
    "unreadable_reference": ("error", "unreadable_reference"),
    "comparison_timeout": ("timeout", "comparison_timeout"),
    "comparison_failed": ("error", "comparison_failed"),
}


@dataclass(frozen=True, slots=True)
class _Options:
    """How a task wants to be compared; the names are Math-Verify's."""

    match_types: tuple[str, ...] = ("latex", "expr")
    boxed_match_priority: int = 0
    float_rounding: int = 6
    strict: bool = True
    allow_set_relation_comp: bool = False

    def of_math_verify(self) -> dict[str, Any]:
        """Return them as they are sent to Math-Verify."""
        return {**asdict(self), "match_types": list(self.match_types)}


_OPTION_TYPES: Mapping[str, tuple[type, ...]] = {
    "match_types": (list, tuple),
    "boxed_match_priority": (int,),
    "float_rounding": (int,),
    "strict": (bool,),
    "allow_set_relation_comp": (bool,),
}


class MathEnv(GeneratingVerifier):
    """Mathematical answers.

    A response is read outside its thoughts: the last box, else the last answer tags, else what follows "the answer is",
    else the last formula or number. Numbers, fractions, percentages, roots, powers of pi, lists of them and words are
    compared exactly and at once. What is left goes to Math-Verify, if it is installed, in a process of its own and
    under a wall clock; otherwise the outcome is `error`, which trainers leave out, and never a guess.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Mathematical answers: exact arithmetic first, Math-Verify behind it.",
        "actions": "A response with the answer in a box, in answer tags, or at its end.",
        "reward": "1 where the answer is equal to the reference, else 0.",
        # A comparison by Math-Verify may take its whole time-out.
        "inline": False,
        "example_reply": "\\boxed{{{answer}}}",
        "baselines": {"random": 0.01, "constant action": 0.01, "blind": 0},
    }

    def __init__(
        self,
        *,
        kinds: Annotated[
            Sequence[str], SomeOf(*KINDS), Field(description="Kinds of generated tasks.")
        ] = KINDS,
        split: TaskSplit = None,
        backend: Annotated[
            Literal["auto", "math-verify", "none"],
            OneOf("auto", "math-verify", "none"),
            Field(
                description=(
                    '"auto" asks Math-Verify where it is installed, "math-verify" insists on it, "none" '
                    "never asks."
                )
            ),
        ] = "auto",
        timeout_s: Annotated[
            float, Field(ge=0.1, le=30, description="Wall clock of one comparison by Math-Verify.")
        ] = 5.0,
        processes: Annotated[
            int,
            OPERATOR,
            Field(
                ge=1,
                description="Comparisons by Math-Verify that may run at a time, in all verifiers of this process.",
            ),
        ] = 1,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        installed = backend != "none" and find_spec("math_verify") is not None
        if backend == "math-verify" and not installed:
            raise ValueError(f"backend 'math-verify' needs Math-Verify: {install_line('math')}")
        self._kinds = tuple(kinds)
        self._timeout_s = timeout_s
        self._symbolic = SymbolicComparison(processes, timeout_s) if installed else None

    def generate_task(self) -> dict[str, Any]:
        """Draw a question of the wanted kinds, and its answer."""
        kind = self._kinds[int(self.np_random.integers(len(self._kinds)))]
        question, answer = _MAKERS[kind](self.np_random)
        return {"question": question, "answer": answer}

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task: a `question` (or `problem`), an `answer` (or a list of which any will do), and options."""
        question = fields.get("question", fields.get("problem"))
        if not isinstance(question, str):
            raise ValueError("a task needs the field 'question' (or 'problem'), as text")
        _references(fields)
        _options(fields)
        return {**fields, "question": question, "answer": fields["answer"]}

    def instruction(self) -> str:
        """Return how to answer."""
        return "Solve the problem. Put the final answer in a box, for example \\boxed{12}."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Compare a response's answer with the task's; the detail begins with the reason in a word."""
        try:
            references, options = _references(task), _options(task)
        except ValueError as error:
            return Verdict(0.0, "error", f"bad_task: {error}")
        question = task.get("question", task.get("problem"))
        asked = asked_of(question)
        text = without_thoughts(response)
        verdicts: list[Verdict] = []
        give_up = time.monotonic() + _MOST_TIMEOUTS * self._timeout_s
        for gold in references:
            if verdicts and time.monotonic() > give_up:
                # What cannot be read beside one reference is not tried beside many.
                break
            verdict = self._verdict(text, gold, options, asked)
            if verdict.outcome == "correct":
                return verdict
            verdicts.append(verdict)
        return max(verdicts, key=lambda each: _RANK[each.outcome])

    def close(self) -> None:
        """Give the processes back."""
        if self._symbolic is not None:
            self._symbolic.close()

    def _verdict(self, text: str, gold: str, options: _Options, asked: QuestionContext) -> Verdict:
        reference = _reference(gold)
        found, comparison = _judge(text, reference, options, asked)
        if found is None:
            return Verdict(0.0, "unparsable", "no_answer: the response gives none that could be read")
        if comparison.equal is None:
            return self._ask(text, gold if reference is None else reference, found, options)
        said = f"{comparison.reason}: {shortened(found.text)}"
        if comparison.equal:
            return Verdict(1.0, "correct", said)
        return Verdict(0.0, "wrong", f"{said}, expected {shortened(gold)}")

    def _ask(self, text: str, gold: str, found: FoundAnswer, options: _Options) -> Verdict:
        """Have Math-Verify compare what arithmetic cannot."""
        if self._symbolic is None:
            return _alone(gold, found)
        answers = {}
        spread = both_signs(found.text)
        if found.place in ("tag", "phrase") or spread != found.text:
            answers[found.text] = _anchored(typeset(spread), options)
        else:
            around = _vicinity(text, found)
            answers[around] = _whole(typeset(around), options)
            answers[found.raw] = _anchored(typeset(found.raw), options)
        wanted = _anchored(typeset(both_signs(gold)), options)
        asked = self._symbolic.compare(
            wanted, answers, options.of_math_verify() | {"in_box": found.place == "box"}
        )
        outcome, reason = _SAID[asked.judgement]
        why = f" ({shortened(asked.why)})" if asked.why else ""
        expected = "" if outcome == "correct" else f", expected {shortened(gold)}"
        return Verdict(
            float(outcome == "correct"), outcome, f"{reason}: {shortened(found.text)}{expected}{why}"
        )


def _alone(gold: str, found: FoundAnswer) -> Verdict:
    """Say what is not compared by arithmetic, and what Math-Verify is not here to compare."""
    # The same text on every machine, since it is part of what a replay is compared with.
    said = f"needs_math_verify: {shortened(found.text)}, expected {shortened(gold)} (install the extra math)"
    # Where the reference can be compared with, it is the answer that cannot.
    return Verdict(0.0, "unparsable" if is_exact(gold) else "error", said)


def _judge(
    text: str, gold: str | None, options: _Options, asked: QuestionContext
) -> tuple[FoundAnswer | None, Comparison]:
    """Find the answer in what was said, and compare it as far as its form tells; no gold, no comparison."""

    def against(answer: str) -> Comparison:
        if gold is None:
            return UNDECIDED
        return compare(gold, answer, rounding=options.float_rounding, asked=asked)

    found = marked_answer(text)
    if found is not None:
        if not found.text:
            return None, UNDECIDED
        comparison = against(found.text)
        if found.place == "box" and not comparison.equal and "\\text" in found.text:
            phrase = last_phrase(unwrapped(found.text), short=False)
            if phrase is not None and phrase.text:
                found = replace(found, text=phrase.text)
                comparison = against(phrase.text)
        return found, _against_sentence(found.text, against) if comparison.equal is None else comparison
    whole = text.strip()
    if len(whole) <= _LONGEST_WHOLE and "\n" not in whole and whole:
        # The response may be nothing but the answer, with a word that leads to it.
        answer = inside_dollars(without_lead_in(whole))
        comparison = against(answer)
        sentence = _PROSE.search(without_formulas(answer)) is not None
        if comparison.equal or not sentence:
            sum_, _, after = answer.rpartition("=")
            if comparison.equal is None and sum_ and not any(map(str.isalpha, sum_)):
                return FoundAnswer("whole", after.strip(), whole), against(after)
            return FoundAnswer("whole", answer, whole), comparison
    found = last_formula_or_number(text)
    if found is None and gold is not None and _WORD.search(gold) and "\\frac" not in gold:
        # Words are expected, and there are words.
        return (FoundAnswer("whole", whole, whole), against(whole)) if whole else (None, UNDECIDED)
    if found is None or (found.place == "number" and "expr" not in options.match_types):
        return None, UNDECIDED
    if found.place == "number" and (unit := _unit_behind(text, found)):
        measured = replace(found, text=f"{found.text} {unit}")
        if (comparison := against(measured.text)).equal is not None:
            return measured, comparison
    return found, against(found.text)


def _unit_behind(text: str, found: FoundAnswer) -> str:
    """Return the unit of the number that ends a response: 5 cents are not 5 dollars."""
    match = _UNIT_AT_END.match(text, text.rfind(found.raw) + len(found.raw))
    return match["unit"] if match is not None and unit_of(match["unit"]) is not None else ""


def _against_sentence(text: str, against: Callable[[str], Comparison]) -> Comparison:
    """Compare the number in a sentence such as "42 apples in all"; nothing of what is none."""
    said = unwrapped(text)
    numbers = numbers_in(said)
    if len(numbers) != 1 or _WORD.search(said) is None or _FUNCTION.search(said) is not None:
        return UNDECIDED
    place = said.find(numbers[0])
    before = _CLAUSE.split(said[:place])[-1]
    if _RELATED.search(before) is not None or is_denied_behind(said, place + len(numbers[0])):
        # More than 42 is not 42.
        return against(f"\\neq {numbers[0]}")
    return against(numbers[0])


# A reference is compared with the responses of a whole group, and again in later passes.
@lru_cache(maxsize=1024)
def _reference(gold: str) -> str | None:
    """Return the answer that a reference gives; None if that is not plain to see."""
    marked = _REFERENCE_MARK.search(gold)
    if marked is not None:
        return marked[1].strip()
    if "\\boxed" in gold or "\\fbox" in gold:
        box = last_box(gold)
        return box.text if box is not None and box.text and box.parts == box_count(gold) else None
    inner = inside_dollars(without_lead_in(gold, labels=True))
    if "$" in inner.replace(_CURRENCY, "").strip("$"):
        return None
    return inner if inner.startswith(_CURRENCY) else inner.replace(_CURRENCY, "")


def _anchored(text: str, options: _Options) -> str:
    """Return a text that is an answer in a form that Math-Verify takes for one."""
    if "latex" not in options.match_types or _ANCHOR.search(text) is not None:
        return text
    return f"\\boxed{{{text.replace(_CURRENCY, '')}}}"


def _whole(text: str, options: _Options) -> str:
    short = len(text) <= _LONGEST_WHOLE and "\n" not in text.strip()
    return _anchored(text.strip(), options) if short and _WORD.search(text) is None else text


def _vicinity(text: str, found: FoundAnswer) -> str:
    """Return an answer with what stands around it: Math-Verify reads answers that consist of several."""
    start = text.rfind(found.raw)
    if start < 0:
        return found.raw
    end = start + len(found.raw)
    return text[max(0, start - _VICINITY) : end + _VICINITY]


def _references(task: Mapping[str, Any]) -> list[str]:
    """Return the references of a task.

    Raises:
        ValueError: It has none, or something else.
    """
    answer = task.get("answer")
    answers = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if not answers or not all(is_reference(each) and not isinstance(each, bool) for each in answers):
        raise ValueError(
            "a task needs the field 'answer': text, a number, or a list of them of which any will do"
        )
    return [str(each).strip() for each in answers]


def _options(task: Mapping[str, Any]) -> _Options:
    """Return the options that a task names.

    Raises:
        ValueError: Math-Verify has no such option.
    """
    given = {name: task[name] for name in _OPTION_TYPES if name in task}
    if not given:
        return _DEFAULTS
    for name, value in given.items():
        kinds = _OPTION_TYPES[name]
        if not isinstance(value, kinds) or (kinds == (int,) and isinstance(value, bool)):
            raise ValueError(f"the option '{name}' cannot be {value!r}")
    types = tuple(given.get("match_types", _DEFAULTS.match_types))
    if not types or not all(each in ("latex", "expr") for each in types):
        raise ValueError(f"match_types must be some of 'latex' and 'expr', not {list(types)!r}")
    if not 0 <= given.get("float_rounding", 0) <= 15:
        raise ValueError("float_rounding must be between 0 and 15")
    return _Options(**cast(dict[str, Any], {**given, "match_types": types}))


_DEFAULTS = _Options()


def _number(generator: Generator, low: int, high: int) -> int:
    return int(generator.integers(low, high + 1))


def _fractions(generator: Generator) -> tuple[str, str]:
    one = Fraction(_number(generator, 1, 11), _number(generator, 2, 12))
    other = Fraction(_number(generator, 1, 11), _number(generator, 2, 12))
    name = ("sum", "product", "difference")[_number(generator, 0, 2)]
    value = {"sum": one + other, "product": one * other, "difference": one - other}[name]
    return f"What is the {name} of {one} and {other}? Give a reduced fraction or a whole number.", str(value)


def _equation(generator: Generator) -> tuple[str, str]:
    factor, shift, right = _number(generator, 2, 12), _number(generator, -20, 20), _number(generator, -40, 40)
    sign = "+" if shift >= 0 else "-"
    return f"Solve ${factor}x {sign} {abs(shift)} = {right}$ for $x$.", str(Fraction(right - shift, factor))


def _percentage(generator: Generator) -> tuple[str, str]:
    whole = 20 * _number(generator, 2, 40)
    part = _number(generator, 1, 19) * whole // 20
    return f"What percentage of {whole} is {part}?", f"{Fraction(100 * part, whole)}%"


def _root(generator: Generator) -> tuple[str, str]:
    one, other = _number(generator, 1, 20), _number(generator, 1, 20)
    inside, outside = one * one + other * other, 1
    for divisor in range(2, math.isqrt(inside) + 1):
        while inside % (divisor * divisor) == 0:
            inside //= divisor * divisor
            outside *= divisor
    root = f"\\sqrt{{{inside}}}" if inside > 1 else ""
    answer = f"{outside}{root}" if outside > 1 or not root else root
    return (
        f"The legs of a right triangle are {one} and {other} long. How long is its hypotenuse, exactly?",
        answer,
    )


def _points(generator: Generator) -> tuple[str, str]:
    first = _number(generator, -9, 9), _number(generator, -9, 9)
    second = _number(generator, -9, 9), _number(generator, -9, 9)
    middle = [Fraction(one + other, 2) for one, other in zip(first, second, strict=True)]
    return f"What is the midpoint of ${first}$ and ${second}$?", f"({middle[0]}, {middle[1]})"


def _divisors(generator: Generator) -> tuple[str, str]:
    one, other = _number(generator, 12, 400), _number(generator, 12, 400)
    if _number(generator, 0, 1):
        return f"What is the greatest common divisor of {one} and {other}?", str(math.gcd(one, other))
    return f"What is the least common multiple of {one} and {other}?", str(math.lcm(one, other))


_MAKERS: Mapping[str, Callable[[Generator], tuple[str, str]]] = dict(
    zip(KINDS, (_fractions, _equation, _percentage, _root, _points, _divisors), strict=True)
)
