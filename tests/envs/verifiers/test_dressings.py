"""What verdicts do not depend on, and what they do: right and wrong answers in the same dressings.

A right answer stays right in every dressing (a box, tags, a sentence, thinking before it, another notation), and a
wrong one, which differs from it by little (a digit, a sign, a unit, the order), stays wrong in them. Pairs of an answer
and a dressing:

| verifier | pairs |
|---|---|
| Math-v0, exactly | 10,758 |
| Math-v0, in formulas and words | 1,304 |
| Math-v0, behind Math-Verify | 88 |
| Arithmetic-v0 | 952 |
| QA-v0 | 2,520 |
| MultipleChoice-v0 | 1,960 |
| CodeTests-v0: programs that are found, and judged | 84, 16 |
| FunctionCalls-v0, seven formats | 4,554 |
| InstructionFollowing-v0 | 2,400 |
| Format-v0 | 960 |
| Judge-v0: verdicts of judges | 170 |
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.envs.code.extraction import extract
from rollgym.envs.verifiers.arithmetic import ArithmeticEnv
from rollgym.envs.verifiers.base import VerifierEnv
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from rollgym.envs.verifiers.formats.environment import FormatEnv
from rollgym.envs.verifiers.function_calls import FunctionCallsEnv
from rollgym.envs.verifiers.instructions.environment import InstructionFollowingEnv
from rollgym.envs.verifiers.judging.templates import NumberVerdict, TokenVerdict, UnreadableVerdictError
from rollgym.envs.verifiers.mathematics import MathEnv
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv
from rollgym.envs.verifiers.question_answering import QuestionAnsweringEnv
from tests.support import form_answers, instruction_answers
from tests.support.dressings import BARE, FENCES, IN_WORDS, LETTERS, MARKED, THOUGHTS, Dressing, thought
from tests.support.sandboxes import working_sandbox

Answers = tuple[str, Sequence[str], Sequence[str]]
"""A reference, answers that are equal to it, and answers that are not."""


class Judged:
    """Answers in dressings, and those that were judged otherwise than they should be."""

    def __init__(self) -> None:
        self.pairs = 0
        self.failures: list[tuple[Any, ...]] = []

    def judge(
        self,
        is_correct: Callable[[str], bool],
        rights: Sequence[str],
        wrongs: Sequence[str],
        dressings: Mapping[str, Dressing],
        about: object = "",
    ) -> None:
        """Judge right and wrong answers in all dressings; what is discarded in one would be judged the other way."""
        answers = [*((each, True) for each in rights), *((each, False) for each in wrongs)]
        for said, is_right in answers:
            other = (wrongs if is_right else rights)[0]
            for name, dressing in dressings.items():
                self.pairs += 1
                reply = dressing(said, other)
                if is_correct(reply) is not is_right:
                    self.failures.append(
                        (about, name, reply, "should be right" if is_right else "should be wrong")
                    )

    def assert_all(self, at_least: int) -> None:
        """See that there were enough, and that none failed."""
        assert not self.failures, (len(self.failures), self.failures[:12])
        assert self.pairs >= at_least


def correct(verifier: VerifierEnv, task: Mapping[str, Any]) -> Callable[[str], bool]:
    return lambda reply: verifier.score(reply, task).outcome == "correct"


def _whole_numbers() -> Iterator[Answers]:
    for number in (7, -12, 42, 1000, 34521, 9007199254740993):
        rights = [f"{number}", f"{number:,}", f"{number}.0", rf"\frac{{{2 * number}}}{{2}}", f"x = {number}"]
        rights += [
            rf"{number} \text{{ apples}}",
            f"{number}.",
            rf"{number - 3} + 3",
            f"{number}".replace("-", "−"),
        ]
        wrongs = [f"{number + 1}", f"{-number}", f"{number}0", f"{number}.5", rf"\frac{{{number}}}{{2}}"]
        wrongs += [
            f"{number}x",
            f"{number - 1:,}",
            f"{number}, {number + 1}",
            rf"{number}\pi",
            rf"\neq {number}",
        ]
        yield str(number), rights, wrongs


def _fractions() -> Iterator[Answers]:
    for above, below in ((1, 3), (-7, 8), (22, 7), (5, 12)):
        sign, size = ("-" if above < 0 else ""), abs(above)
        gold = rf"{sign}\frac{{{size}}}{{{below}}}"
        rights = [f"{above}/{below}", rf"{sign}\dfrac{{{size}}}{{{below}}}", rf"\frac{{{above}}}{{{below}}}"]
        rights += [f"{above / below:.12f}", rf"\frac{{{3 * above}}}{{{3 * below}}}", f"({above})/({below})"]
        wrongs = [f"{below}/{above}", f"{-above}/{below}", f"{above + 1}/{below}", f"{above}/{below + 1}"]
        wrongs += [f"{above / below:.2f}1", f"{above}", rf"\frac{{{above}}}{{{below}}}x"]
        yield gold, rights, wrongs


NOTATIONS: Sequence[Answers] = [
    (r"25\%", ["25%", "25 percent", "0.25", r"\frac14", "25.0%"], ["26%", "2.5%", "0.026", "-25%", "250%"]),
    (
        r"\$18.50",
        ["18.5", "$18.50", "18.50 dollars", "1850 cents"],
        ["18.05", "18.5 cents", "€18.50", "-18.50"],
    ),
    (
        r"3\sqrt{13}",
        [r"\sqrt{117}", r"3 \cdot \sqrt{13}", r"\sqrt{13} \cdot 3", "3√13"],
        [r"3\sqrt{12}", r"\sqrt{39}", r"-3\sqrt{13}", r"2\sqrt{13}", r"3 + \sqrt{13}", "39"],
    ),
    (
        r"\frac{9}{4}\pi",
        [r"\frac{9\pi}{4}", r"2.25\pi", "9π/4", r"\pi \cdot \frac94"],
        [r"\frac{9}{4}", r"\frac{4}{9}\pi", r"\frac{9}{4}\pi^2", r"-\frac{9\pi}{4}", r"\frac{8}{4}\pi"],
    ),
    (
        "2^{-100}",
        [r"\frac{1}{2^{100}}", "4^{-50}", "0.5^{100}"],
        ["2^{-99}", "2^{100}", "0", "-2^{-100}", "4^{-51}"],
    ),
    ("12!", ["479001600", r"12 \cdot 39916800", "479,001,600"], ["13!", "479001601", "11!", "12", "-12!"]),
    (r"6.02 \times 10^{23}", ["6.02e23", r"602 \cdot 10^{21}"], ["6.02e22", r"6.03 \times 10^{23}", "6.02"]),
    (
        "(3, -4)",
        ["(3,-4)", r"\left(3, -4\right)", "(3.0, -4)", r"(\frac62, -4)"],
        ["(-4, 3)", "(3, 4)", "(3, -5)", "[3, -4]"],
    ),
    ("3, 5", ["5, 3", r"3 \text{ and } 5", r"\{3, 5\}", "3.0, 5"], ["3", "3, 6", "3, 5, 7", "-3, 5", "35"]),
    ("[0, 1)", ["[0,1)", r"\left[0, 1\right)"], ["(0, 1)", "[0, 1]", "[0, 2)", "(0, 1]"]),
    (
        r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}",
        [r"\begin{bmatrix} 1 \\ -2 \end{bmatrix}", r"\begin{pmatrix} 1.0 \\ -2 \\ \end{pmatrix}"],
        [r"\begin{pmatrix} -2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    ),
    ("5 m", ["500 cm", r"5 \text{ m}", "5 meters", "0.005 km"], ["5 cm", "50 m", "5 kg", "-5 m", "5 m^2"]),
    (
        r"15\text{ cm}^2",
        ["15", "15 square centimeters", "15 cm²"],
        [r"15\text{ cm}", "16 cm²", "15 mm²", "51 cm²"],
    ),
    (
        r"60^\circ",
        ["60", "60 degrees", "60°", r"\frac{\pi}{3} \text{ radians}"],
        ["61", r"60 \text{ radians}", "-60°"],
    ),
    (
        "2 h 30 min",
        [r"2 \text{ hours } 30 \text{ minutes}", "150 minutes"],
        ["2 h 20 min", "30 h 2 min", "2", "150 h"],
    ),
    ("12", [r"12^{\text{th}}", "12th", "12^{th}"], [r"13^{\text{th}}", "21st", "2^{nd}"]),
    ("x=1, y=2", ["y = 2, x = 1", "(x, y) = (1, 2)"], ["x = 2, y = 1", "(y, x) = (1, 2)", "x = 1, y = 3"]),
    ("1:2:3", ["2:4:6", "1 : 2 : 3"], ["1:3:2", "3:2:1", "1:2:4"]),
    ("2010_7", ["2010_{7}", "(2010)_7"], ["2010_8", "2011_7", "210_7"]),
    ("Tom", [r"\text{Tom}", "tom", "**Tom**"], ["Tim", "omT", "Mot", "Tommy", "Anna"]),
    (r"\text{Evelyn}", ["Evelyn", "evelyn"], ["Evelin", "Eve", "Lynn", "7"]),
    (r"\text{New York}", ["New York", "new york"], ["York", "New Yorker", "York New"]),
    ("x^2+1", ["x^2 + 1", "x^{2}+1", "x²+1"], ["7", "Tom", "(1, 2)"]),
]


def test_mathematics() -> None:
    verifier, judged = MathEnv(backend="none"), Judged()
    for gold, rights, wrongs in (*_whole_numbers(), *_fractions(), *NOTATIONS):
        task = {"question": "What is it?", "answer": gold}
        judged.judge(correct(verifier, task), rights, wrongs, thought(MARKED) | BARE, gold)
    judged.assert_all(at_least=5_000)


def test_mathematics_in_formulas() -> None:
    verifier, judged = MathEnv(backend="none"), Judged()
    for gold, rights, wrongs in (*_whole_numbers(), *_fractions(), *NOTATIONS):
        task = {"question": "What is it?", "answer": gold}
        judged.judge(correct(verifier, task), rights, wrongs, IN_WORDS, gold)
    judged.assert_all(at_least=1_000)


FORMULAS: Sequence[Answers] = [
    ("x^2-1", ["(x-1)(x+1)", r"x \cdot x - 1", "-1+x^2"], ["(x-1)^2", "x^2+1", "1-x^2", "y^2-1", "x^2-1.5"]),
    (
        r"\sin(2x)",
        [r"2\sin x\cos x", r"2\cos(x)\sin(x)"],
        [r"2\sin x", r"\sin(x)\cos(x)", r"\sin(3x)", r"-\sin(2x)"],
    ),
    (
        "e^{-100}",
        [r"\frac{1}{e^{100}}", "e^{-50}e^{-50}"],
        ["e^{-99}", "e^{100}", "0", "0.000000", "-e^{-100}"],
    ),
    (
        r"\frac{\ln 2}{\ln 10}",
        [r"\log_{10}(2)", r"\log_{10} 2"],
        [r"\log_{2}(10)", r"\ln 2", r"\log_{10}(3)"],
    ),
    ("x < 3", [r"3 > x", "x<3"], ["x > 3", r"x \leq 3", "x < 4", "y < 3"]),
    ("3+4i", [r"\frac{25}{3-4i}", "4i+3"], ["3-4i", "4+3i", "7i", "-3-4i"]),
    ("ab", ["ba", r"a \cdot b"], ["a+b", "abc", "aB", r"\frac{a}{b}"]),
]


def test_formulas_that_need_math_verify() -> None:
    pytest.importorskip("math_verify")
    judged = Judged()
    dressings = {name: MARKED[name] for name in ("box in a sentence", "tags behind others")}
    with closing(MathEnv(backend="math-verify", timeout_s=20)) as verifier:
        for gold, rights, wrongs in FORMULAS:
            task = {"question": "What is it?", "answer": gold}
            judged.judge(correct(verifier, task), rights, wrongs, dressings, gold)
    judged.assert_all(at_least=80)


def test_sums() -> None:
    verifier, judged = ArithmeticEnv(), Judged()
    for number in (7, -12, 1234, 0, 99999):
        rights = [f"{number}", f"{number:,}", f"{number}".replace("-", "−")]
        wrongs = [f"{number + 1}", f"{number}1", f"{number - 10}", *([f"{-number}"] if number else [])]
        places = {name: each for name, each in MARKED.items() if not name.startswith(("phrase", "framed"))}
        task = {"question": "1 + 1", "answer": str(number)}
        judged.judge(correct(verifier, task), rights, wrongs, thought(places | BARE), number)
    judged.assert_all(at_least=800)


SHORT_ANSWERS: Sequence[tuple[str, str, Sequence[str], Sequence[str]]] = [
    (
        "auto",
        "Marie Curie",
        ["Marie Curie", "marie curie", "Marie  Curie", "MARIE CURIE"],
        ["Curie Marie", "Marie", "Pierre Curie"],
    ),
    (
        "auto",
        "the Eiffel Tower",
        ["The Eiffel Tower", "Eiffel Tower", "the Eiffel Tower!"],
        ["Eiffel", "Tower of Pisa"],
    ),
    ("auto", "1492", ["1492", "1,492", "1492.0"], ["1493", "-1492", "149", "14920", "1942"]),
    ("auto", "3.5", ["3.5", "7/2", "3.50"], ["3.6", "35", "-3.5", "3"]),
    ("auto", "5 km", ["5 km", "5", "5000 m", "5 kilometers"], ["5 m", "6 km", "5 kg", "500 m"]),
    ("auto", "7:30 pm", ["7:30 pm", "7:30 PM"], ["7:30 am", "8:30 pm", "7:40 pm"]),
    ("auto", "5 million", ["5 million", "5,000,000"], ["5 billion", "6 million", "5 thousand"]),
    (
        "auto",
        "2024-03-05",
        ["2024-03-05", "March 5, 2024", "5 March 2024"],
        ["2024-05-03", "2024-03-06", "March 5, 2023"],
    ),
    ("auto", "yes", ["yes", "Yes", "YES", "true"], ["no", "No", "false", "not true"]),
    ("exact", "café", ["café", "Café", "cafe\u0301"], ["cave", "coffee"]),
    ("contains", "Paris", ["Paris", "Paris, France", "in Paris"], ["Parish", "London", "Par is"]),
]


def test_short_answers() -> None:
    verifier, judged = QuestionAnsweringEnv(), Judged()
    places = {name: each for name, each in MARKED.items() if name != "framed box"}
    for metric, gold, rights, wrongs in SHORT_ANSWERS:
        task = {"question": "What is it?", "answer": gold, "metric": metric}
        judged.judge(correct(verifier, task), rights, wrongs, thought(places | BARE), (metric, gold))
    judged.assert_all(at_least=1_500)


def test_choices() -> None:
    verifier, judged = MultipleChoiceEnv(), Judged()
    for answer, options in (
        ("B", ["Berlin", "Paris", "Rome", "Oslo"]),
        ("D", ["12", "13", "21", "31"]),
        ("A", ["a dog", "two cats"]),
    ):
        letters = "ABCD"[: len(options)]
        task = {"question": "Which?", "options": options, "answer": answer}
        is_correct, others = correct(verifier, task), [each for each in letters if each != answer]
        judged.judge(is_correct, [answer], others, thought(MARKED | BARE | LETTERS), answer)
        lines = {
            letter: f"{letter}{mark} {text}"
            for letter, text in zip(letters, options, strict=True)
            for mark in ")"
        }
        for mark in (")", ".", ":"):
            lines = {letter: f"{letter}{mark} {text}" for letter, text in zip(letters, options, strict=True)}
            wrong = [lines[letter] for letter in others]
            judged.judge(is_correct, [lines[answer]], wrong, thought(MARKED | BARE), lines[answer])
        texts = dict(zip(letters, options, strict=True))
        judged.judge(
            is_correct,
            [texts[answer]],
            [texts[letter] for letter in others],
            thought(MARKED | BARE),
            texts[answer],
        )
    judged.assert_all(at_least=1_900)


PROGRAM = "def twice(n):\n    return 2 * n\n"
OTHER_PROGRAM = "def twice(n):\n    return n + n + 1\n"


def test_programs_are_found() -> None:
    judged = Judged()
    for program, other in (
        (PROGRAM, OTHER_PROGRAM),
        (OTHER_PROGRAM, PROGRAM),
        ("print('</think>')", "print('<think>')"),
    ):

        def is_program(reply: str, program: str = program) -> bool:
            found = extract(reply, "python")
            return found is not None and found.code.strip() == program.strip()

        judged.judge(is_program, [program], [other], thought(FENCES), program)
    judged.assert_all(at_least=50)


def test_programs_are_judged() -> None:
    working_sandbox()
    verifier, judged = CodeTestsEnv(seconds=2), Judged()
    tests = ["assert twice(4) == 8", "assert twice(-1) == -2", "assert twice(0) == 0"]
    task = {"prompt": "", "test_list": tests}
    wrongs = [
        OTHER_PROGRAM,
        PROGRAM.replace("2", "3"),
        PROGRAM.replace("twice", "double"),
        f"async {PROGRAM}",
        "def twice(n):\n    return True\n",
    ]
    rights = [PROGRAM, "def twice(n):\n    return n + n\n", "twice = lambda n: n << 1\n"]
    dressings = {name: FENCES[name] for name in ("fence behind another", "no fence")}
    judged.judge(correct(verifier, task), rights, wrongs, dressings, "twice")
    judged.assert_all(at_least=14)


def _changed(call: ToolCall) -> Iterator[ToolCall]:
    """Yield calls that differ by little."""
    yield ToolCall(f"{call.name}s", call.arguments)
    for name, value in call.arguments.items():
        rest = {key: each for key, each in call.arguments.items() if key != name}
        yield ToolCall(call.name, rest)
        yield ToolCall(call.name, {**rest, f"{name}_": value})
        other: Any = (
            (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else None
        )
        if isinstance(value, str):
            other = f"{value}x"
        if isinstance(value, list):
            other = [*value, 1]
        yield ToolCall(call.name, {**rest, name: other})


@pytest.mark.parametrize("name", FORMATS)
def test_calls(name: str) -> None:
    verifier, judged, form = FunctionCallsEnv(call_format=name), Judged(), FORMATS[name]
    around: Mapping[str, Dressing] = {
        "nothing": lambda said, other: said,
        "blanks": lambda said, other: f"\n{said}\n",
        **(
            {"a sentence": lambda said, other: f"I look it up.\n{said}"}
            if name not in ("openai", "llama", "python")
            else {}
        ),
    }
    for seed in range(12):
        verifier.reset(seed=seed)
        task = verifier.task
        calls = [
            ToolCall(each, {key: values[0] for key, values in wanted.items()})
            for accepted in task["accepted"]
            for each, wanted in accepted.items()
        ]
        if not calls:
            continue
        turned = [ToolCall(call.name, dict(reversed(call.arguments.items()))) for call in calls]
        wrongs = [form.write([changed, *calls[1:]]) for changed in _changed(calls[0])]
        wrongs += [form.write([*calls, calls[0]]), "<answer>none</answer>", "I cannot do that."]
        wrongs += [form.write(calls[1:])] if calls[1:] else []
        judged.judge(
            correct(verifier, task),
            [form.write(calls), form.write(turned)],
            wrongs,
            thought(around),
            (seed, name),
        )
    judged.assert_all(at_least=300)


def test_instructions() -> None:
    verifier, judged = InstructionFollowingEnv(), Judged()
    for seed in range(120):
        verifier.reset(seed=seed)
        task = verifier.task
        right = instruction_answers.answer(task)
        judged.judge(
            correct(verifier, task),
            [right],
            ["Yes.", task["prompt"], ""],
            THOUGHTS | {"nothing": BARE["nothing"]},
            task,
        )
    judged.assert_all(at_least=2_000)


def test_forms() -> None:
    verifier, judged = FormatEnv(), Judged()
    for seed in range(120):
        verifier.reset(seed=seed)
        task = verifier.task
        right = form_answers.answer(task)
        judged.judge(
            correct(verifier, task),
            [right],
            ["", "?", right[: len(right) // 2]],
            {name: BARE[name] for name in ("nothing", "blanks")},
            task,
        )
    judged.assert_all(at_least=500)


def _read_by(reading: Any, wanted: float) -> Callable[[str], bool]:
    def is_read(reply: str) -> bool:
        try:
            return bool(reading.read(reply, []) == wanted)
        except UnreadableVerdictError:
            return False

    return is_read


def test_verdicts_of_judges() -> None:
    judged = Judged()
    token = TokenVerdict(kind="token", tokens={"[[YES]]": 1.0, "[[NO]]": 0.0})
    lines: Mapping[str, Dressing] = {
        "nothing": BARE["nothing"],
        "blanks": BARE["blanks"],
        "bold": BARE["bold"],
        "reasons": lambda said, other: f"It could be {other}, but it is not.\n\n{said}",
        "another line": lambda said, other: f"{other}\n{said}",
        "backticks": lambda said, other: f"So:\n`{said}`",
    }
    judged.judge(
        _read_by(token, 1.0),
        ["[[YES]]"],
        ["[[NO]]", "[[YES]] or [[NO]]", "YES", "[[YES]], says the answer"],
        thought(lines),
    )
    number = NumberVerdict(kind="number", key="score", low=1, high=10)
    objects: Mapping[str, Dressing] = {
        "nothing": BARE["nothing"],
        "blanks": BARE["blanks"],
        "fence": lambda said, other: f"```json\n{said}\n```",
        "reasons": lambda said, other: f"Not {other}.\n{said}",
    }
    rights = [json.dumps({"reasoning": "fine", "score": 10}), '{"score": 10}', '{ "score" : 10.0 }']
    wrongs = [
        '{"score": 9}',
        '{"score": 11}',
        '{"score": "10"}',
        '{"score": true}',
        '{"score": NaN}',
        '{"scores": 10}',
        "10",
    ]
    judged.judge(_read_by(number, 1.0), rights, wrongs, thought(objects))
    judged.assert_all(at_least=100)
