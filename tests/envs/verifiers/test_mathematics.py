"""Math-v0: what it reads, what it decides by itself, and the data sets that it was recorded on."""

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.comparison import compare
from rollgym.envs.verifiers.exact import NotExact, rational
from rollgym.envs.verifiers.extraction import marked_answer, without_thoughts
from rollgym.envs.verifiers.mathematics import KINDS, MathEnv
from rollgym.envs.verifiers.numerals import exact_number
from tests.support.recorded_data import recorded

ALONE = MathEnv(backend="none")
OPTIONS = ("match_types", "boxed_match_priority", "float_rounding", "strict", "allow_set_relation_comp")

EQUAL = [
    *(("5", "5.0"), ("1/2", "0.5"), ("0.5", r"\frac12"), ("-3", "−3"), ("1,000", "1000"), ("18", r"\$18.00")),
    *(("1000000", "10^6"), ("8", "2^{3}"), ("2", r"\sqrt[3]{8}"), (r"3\sqrt{13}", r"\sqrt{117}")),
    *((r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"2\pi", "2π"), ("7/3", r"2\frac{1}{3}")),
    *(("7/3", "2 1/3"), ("14{,}916", "14916"), ("100%", r"\boxed{100\%}"), ("5%", "5"), ("5%", "0.05")),
    *(("0.05", "5%"), ("0.333333", "1/3"), ("1/3", "0.333333"), ("(0.5, 1)", r"(\frac{1}{2}, 1)")),
    *((r"\{1,2\}", r"\{2, 1\}"), (r"6 \text{ and } 8", "6, 8"), ("Evelyn", "evelyn."), ("x^2+1", "x^2 + 1")),
    *((r"\text{(B)}", "B"), ("15", r"15 \text{ cm}^2"), ("12 cm", "12"), (r"90^\circ", "90 degrees")),
    *(("x=5", "5"), ("5", "x = 5"), ("[0,1)", "$[0,1)$"), (r"(-\infty, 2)", r"(-\infty,2)")),
    *(("100000", "1e5"), ("1e5", "100,000"), ("1.5e-3", "0.0015"), ("2E+2", "200"), ("-1e3", "-1000")),
    *(
        ("2/3", r"0.\overline{6}"),
        (r"0.\overline{6}", "2/3"),
        ("1/6", r"0.1\overline{6}"),
        ("12/11", r"1.\bar{09}"),
    ),
    *(
        ("1/3", r"0.\dot{3}"),
        ("41/333", r"0.\dot{1}2\dot{3}"),
        ("1/3", "0.(3)"),
    ),
    *((r"\$18.00", "18"), (r"\$x+1", "x+1"), (r"\$ 5x", "5x"), (r"Total: \$18", "18"), ("18", r"\$18")),
    *(("Thus, $n=2$.", "2"), ("So, 2.", "2"), ("Therefore 2", "2"), ("x = 5 + 6 = 11", "11")),
    *(
        ("11", "x = 5+5+1 = 7 = 11"),
        ("11", "5 + 6 = 11"),
        ("1/3", r"x = 5+5+1 = 1/3 \approx 11"),
        ("8", "f(3) = 2^3 = 8"),
    ),
    *((r"x \neq 42", r"\neq 42"), (r"x \ne 1/2", "x != 0.5")),
    *((r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),),
    *((r"\begin{pmatrix}1/2\\0.25\end{pmatrix}", r"\begin{pmatrix} 0.5 \\ \frac{1}{4} \\ \end{pmatrix}"),),
    *((r"\begin{pmatrix}1&2\end{pmatrix}", r"\left(\begin{array}{cc} 1 & 2 \end{array}\right)"),),
    *(("#### 42", "42"), (r"The answer is \boxed{42}.", "42"), ("$125$", "125 miles")),
    *(("2010_7", "2010_{7}"), ("0101_2", "101_{2}"), (r"2B_{16}", r"(2B)_{16}"), ("1:2:3", "2:4:6")),
    *((r"2 \text{ hours } 30 \text{ minutes}", "2 h 30 min"), ("5 ft 3 in", r"5\text{ ft }3\text{ in}")),
    *((r"8 \mathrm{~cm}, 6 \mathrm{~cm}", "8,6"), (r"\langle 1,-2,3\rangle", "(1,-2,3)")),
    *((r"(1,2)", r"\left\langle 1, 2\right\rangle"), ("-2", r"\sqrt[3]{-8}"), (r"\sqrt[3]{-27}", "-3")),
    *(("5000000", "5 million"), (r"\$1.5 \text{ million}", "1500000"), ("3 thousand dollars", "3,000")),
    *(("5 m/s", "5"), ("5", "5 km/h"), (r"9.8 m/s^2", "9.8")),
    *(("2^{-100}", r"\frac{1}{2^{100}}"), ("(1/2)^{100}", "2**-100"), ("1/2^{64}", "1/18446744073709551616")),
    *(("20!", "2432902008176640000"), (r"\frac{8!}{2!3!}", "3360"), (r"\binom{10}{3}", "120")),
    *((r"\frac{1}{21!}", r"\frac{1}{21 \cdot 20!}"), ("4^{1003}", "2^{2006}"), ("10^-34", r"10^{-34}")),
    *(
        (r"(2^{2005}+1)/(3*2^{2006})", r"\frac16+\frac{1}{3\cdot 2^{2006}}"),
        ("3^{-100}", r"3^{-\sqrt{10000}}"),
    ),
    *(
        (r"\sqrt[3]{10^{-60}}", "10^{-20}"),
        (r"(1+\sqrt{2})^{2}", r"3+2\sqrt{2}"),
        ("2023^{2023}", "2023**2023"),
    ),
    # Units: one that is said on one side alone means nothing.
    *(("5", "5 cm"), ("5 cm", "5"), ("500 cm", "5 m"), (r"5\text{ m}", r"500\text{ cm}"), ("5 kg", "5000 g")),
    *((r"15\text{ cm}^2", "15 square centimeters"), (r"15\text{ cm}^2", r"0.0015\text{ m}^2")),
    *(("36 km/h", "10 meters per second"), ("60 mph", "60 miles per hour"), (r"\$5", "500 cents")),
    *(
        ("90^\\circ", r"\frac{\pi}{2} \text{ radians}"),
        (r"30^\circ\text{C}", "30 °C"),
        ("1 gallon", "4 quarts"),
    ),
    *(
        (r"2 \text{ hours } 30 \text{ minutes}", "150 minutes"),
        ("150 min", "2 h 30 min"),
        ("5 ft 3 in", "63 inches"),
    ),
    *((r"100 \text{ cm}^3", "100 mL"), ("1/3 m", "33.333333 cm"), ("5 dollars per hour", r"\$5/hour")),
    *(("5 apples", "5 pieces of fruit"), ("2 years", "24 months"), ("5 million dollars", r"\$5,000,000")),
    *((r"11:30 \text{ a.m.}", "11:30 AM"), (r"3 \text{ PM}", "3 p.m."), (r"0.5 \text{ dollars}", "50¢")),
    *((r"300 \text{ cm}, 4 \text{ m}", r"3 \text{ m}, 400 \text{ cm}"), (r"\$5, \$6", "6, 5")),
    # Ordinals, and signs and letters that can be written in several ways.
    *(("12", r"12^{\text{th}}"), (r"12^{\text{th}}", "12"), ("3", "3^{rd}"), ("21^{st}", "21"), ("3", "3rd")),
    *(("12", "１２"), ("-12", "－１２"), ("(1,2)", "（１，２）"), ("-5", "‑5"), ("caf\u00e9", "cafe\u0301")),
]
# Numbers that are small, or large, or near to each other, and not equal.
FINE_DIFFERENCES = [
    *(("2^{-100}", "2^{-99}"), ("(1/2)^{100}", "(1/2)^{99}"), ("0.5^{100}", "0.5^{90}"), ("1/20!", "1/21!")),
    *(("1/2^{64}", "1/2^{65}"), (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot 2^{2006}}")),
    *((r"\frac{1}{20!}", r"\frac{1}{21\cdot 20!}"), ("1-2^{-100}", "1"), ("2^{2006}", "2^{2006}+1")),
    *((r"\{2^{-100}\}", r"\{2^{-99}\}"), ("[0, 2^{-100}]", "[0, 2^{-99}]"), ("10^{-30}", "0")),
    *(
        (r"\frac{1}{3000000}", "0.000000"),
        (r"\frac{1}{3000000}", "0.0000003"),
        ("20!", "2432902008176640001"),
    ),
    *((r"\frac{1}{\binom{100}{50}}", r"\frac{1}{\binom{100}{49}}"), ("2023^{2023}", "2023^{2022}")),
]
FINE_FORMULAS = [
    *(("e^{-100}", "e^{-99}"), ("e^{-1000}", "e^{-999}"), (r"\sin(10^{-20})", r"\sin(10^{-21})")),
    *(("x+10^{-20}", "x+10^{-21}"), ("[0, e^{-100}]", "[0, e^{-99}]"), (r"\{e^{-100}\}", r"\{e^{-99}\}")),
    *(("(e^{-100}, 1)", "(e^{-99}, 1)"), ("x > e^{-100}", "x > e^{-99}"), ("e^{-20}", "0.000000001")),
    *(("e^{-20}", "0.0"), (r"\sqrt[3]{2}\cdot 10^{-30}", r"\sqrt[3]{3}\cdot 10^{-30}")),
]
DIFFERENT = [
    *(("5", "55"), ("5", "5x"), ("2", "2xy"), ("2", r"\sqrt{2}"), ("1", "x^2+1"), ("7", "2x+3=7")),
    *(
        ("5", "3-5"),
        ("3", "3.14"),
        ("1/3", "0.33"),
        ("5", "-5"),
        ("32349", "32, 349"),
        ("5", "3 or 5"),
        ("5", "5 or 6 apples"),
        ("5", "from 5 to 6 in all"),
    ),
    *(("5", "5 or 3"), ("5", "between 4 and 5"), ("5", "x > 5"), ("x>5", "5"), ("12", "1 2"), ("5", "not 5")),
    *(("(1,2)", "(2,1)"), ("(0,1)", "[0,1]"), ("(1,234)", "1234"), ("204_5", "204"), (r"\text{E}", "e")),
    *(("3", r"\log 3"), ("1", "sin 1"), ("3", "1, 2, 3"), ("5", "v5"), ("5", "0.05"), ("2x", "2")),
    *(
        ("100000", "1e6"),
        ("1e5", "15"),
        ("2/3", r"0.\overline{60}"),
        ("1/3", "0.34..."),
        ("42", r"x \neq 42"),
    ),
    *(
        ("42", r"\neq 42"),
        (r"\neq 42", "42"),
        (r"x \neq 42", "x = 42"),
        (r"x \neq 42", r"x \neq 43"),
        ("5", r"\geq 5"),
    ),
    *(("7", "x = 7 = 11"), ("5", "5 = 7"), ("2", "So, 3."), ("2", "Thus, $n=3$.")),
    *((r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),),
    *(
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}"),
        ("1", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ),
    *(("2010_7", "2010_8"), ("2010_{7}", "2011_{7}"), ("1:2:3", "1:3:2"), ("1:2:3", "1"), ("3", "1:2:3")),
    *((r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours } 20 \text{ minutes}"),),
    *((r"5 \text{ ft } 3 \text{ in}", "5 ft 9 in"), ("5", r"5 \text{ hours } 6 \text{ minutes}")),
    *(("2 hours 30 minutes", "2"), ("2 hours 30 minutes", "30 hours 2 minutes")),
    *(("5000000", "5 thousand"), (r"(1,2)", r"\langle 2,1\rangle"), ("2", r"\sqrt[3]{-8}")),
    *(("5 m", "5 cm"), (r"5\text{ m}", r"5\text{ cm}"), ("5 m", "5 s"), (r"15\text{ cm}^2", r"15\text{ cm}")),
    *((r"50\,\frac{\text{km}}{\text{h}}", "50 m/s"), (r"\$5", "5 cents"), (r"\$5", "€5"), ("5 am", "5 pm")),
    *(("90^\\circ", r"90 \text{ radians}"), (r"30^\circ\text{C}", "30 °F"), ("5 seconds", "5 minutes")),
    *((r"2 \text{ hours } 30 \text{ minutes}", "150 hours"), ("5 m^2", "5 m"), ("1 mile", "1.6 km")),
    *(
        ("Tom", "omT"),
        (r"\text{Tom}", r"\text{Mot}"),
        ("odd", "ddo"),
        ("12", r"13^{\text{th}}"),
        ("3", "4^{rd}"),
    ),
    *(("42", r"\text{The answer is } 43"), ("42", r"\text{more than } 42"), ("42", "anything but 42")),
    *(("42", r"\text{The answer is not } 42"), ("42", "at least 42")),
    *(("14", "2024-10-14"), ("0", r"\emptyset"), ("e", "2.718281828"), ("3", r"\frac{3}{"), ("5", "")),
]

_IN_WORDS = re.compile(r"more than|anything but|at least|\\text")


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers_are_equal_wherever_they_stand(gold, answer):
    for said in (answer, rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"The answer is {answer}"):
        verdict = ALONE.score(f"<think>It is 999.</think>{said}", {"answer": gold})
        assert verdict.outcome == "correct", (said, verdict)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT + FINE_DIFFERENCES)
def test_different_answers_are_never_correct(gold, answer):
    marked = [rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>"]
    # In free prose the last number is the answer, whatever is said of it.
    prose = [] if _IN_WORDS.search(answer) else [answer, f"We find that it is {answer}."]
    for said in marked + prose:
        verdict = ALONE.score(said, {"answer": gold})
        assert (verdict.score, verdict.outcome != "correct") == (0.0, True), (said, verdict)


def test_small_numbers_are_compared_by_their_own_size(hasty):
    for gold, answer in FINE_DIFFERENCES + FINE_FORMULAS:
        for one, other in ((gold, answer), (answer, gold)):
            verdict = hasty.score(rf"\boxed{{{other}}}", {"answer": one})
            assert verdict.outcome == "wrong", (one, other, verdict)
    for gold, answer in (
        ("e^{-100}", r"\frac{1}{e^{100}}"),
        (r"\begin{pmatrix}e^{-100}\\1\end{pmatrix}", r"\begin{pmatrix}\frac{1}{e^{100}}\\1\end{pmatrix}"),
        (r"\sqrt[3]{2}\cdot 10^{-30}", r"10^{-30}\cdot 2^{1/3}"),
        (r"\sqrt{5+2\sqrt6}-\sqrt2", r"\sqrt3"),
        ("e^{-2}", "0.135335"),
        (r"0.3e^{x}", r"\frac{3e^x}{10}"),
    ):
        assert hasty.score(rf"\boxed{{{answer}}}", {"answer": gold}).outcome == "correct", (gold, answer)


def test_a_reference_that_is_too_large_costs_nothing(hasty):
    task = {"answer": "10^{10^{10}}"}
    assert hasty.score(r"\boxed{10^{10^{10}}}", task).outcome == "correct"
    for said in ("10^{10^{9}}", "5", "x"):
        verdict = hasty.score(rf"\boxed{{{said}}}", task)
        assert (verdict.outcome, verdict.detail.split(":")[0]) == ("error", "unreadable_reference")
        assert "too large" in verdict.detail
    assert hasty.score(r"\boxed{10^{10^{10}}}", {"answer": "5"}).outcome == "unparsable"


def test_a_sentence_in_a_box_is_read_as_one():
    for gold, said in (
        ("42", r"\text{The answer is } 42"),
        (r"\frac{1}{2}", r"\text{The answer is } \frac{1}{2}"),
        ("42", r"\text{There are } 42 \text{ apples}"),
        ("42", r"\text{It is not 41 but } 42"),
    ):
        assert ALONE.score(rf"\boxed{{{said}}}", {"answer": gold}).outcome == "correct"
        assert ALONE.score(rf"\boxed{{{said}}}", {"answer": "7"}).outcome == "wrong"


@pytest.mark.parametrize(
    ("gold", "outcome"),
    [("7", "correct"), ("7 m", "correct"), ("700 cm", "correct"), ("7 cm", "wrong"), ("8", "wrong")],
)
def test_the_unit_behind_the_last_number_counts_beside_another(gold, outcome):
    assert ALONE.score("She needs 2 posts, and so the fence has 7 m.", {"answer": gold}).outcome == outcome


def test_no_unit_is_a_number():
    assert ALONE.score(r"\boxed{5 \text{6}}", {"answer": "5"}).outcome != "correct"


def test_what_a_number_is_counted_in_counts_unless_it_is_asked_for():
    for gold, said in (("5", "5 million"), ("5 million", "5")):
        task = {"question": "How many people live there?", "answer": gold}
        assert ALONE.score(rf"\boxed{{{said}}}", task).outcome == "wrong"
        task["question"] = "How many millions of people live there?"
        assert ALONE.score(rf"\boxed{{{said}}}", task).outcome == "correct"


def test_math_verify_is_not_asked_where_it_takes_one_of_several_numbers_for_all(hasty):
    for gold, said in (
        ("2010_7", "2010_8"),
        ("1:2:3", "1:3:2"),
        (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours } 20 \text{ minutes}"),
    ):
        for form in (rf"\boxed{{{said}}}", f"<answer>{said}</answer>"):
            assert hasty.score(form, {"answer": gold}).outcome == "wrong"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}} so <answer>3</answer>", r"\frac{1}{2}"),
        (r"\boxed{\{1, \text{ab}\}}", r"\{1, \text{ab}\}"),
        (r"\boxed{2} and \boxed{3}", "2, 3"),
        ("<answer>1</answer><answer>2</answer> 3", "2"),
        ("The answer is 4.5. I checked it.", "4.5"),
        ("Final Answer: **12**\nBye 7", "12"),
        (r"\boxed{255} The final answer is $10,455$. I hope it is correct.", "10,455"),
        (r"so \boxed{\frac{1}{2", ""),
        ("A: ", ""),
        ("no mark 5", None),
        (r"my thoughts \boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{2}", None),
    ],
)
def test_where_an_answer_is_marked(response, answer):
    found = marked_answer(without_thoughts(response))
    assert (None if found is None else found.text) == answer


@pytest.mark.parametrize(
    "response", ["Thus, $n=2$.", "So, 2.", "So 2.", "Hence, $2$", "Finally: 2", "Therefore, 2"]
)
def test_a_word_that_leads_to_an_answer_is_no_part_of_it(response):
    assert ALONE.score(response, {"answer": "2"}).outcome == "correct"
    assert ALONE.score(response, {"answer": "3"}).outcome == "wrong"


@pytest.mark.parametrize("relation", ["!=", "≠", "<=", ">=", "≥", "<", "\\neq"])
def test_what_a_number_is_related_to_at_the_end_is_not_that_number(relation):
    worked_out = "There are many ways to look at it. " * 8
    assert ALONE.score(f"{worked_out}So n {relation} 5", {"answer": "5"}).score == 0.0
    assert ALONE.score(f"{worked_out}So n = 5", {"answer": "5"}).score == 1.0


@pytest.mark.parametrize(
    ("number", "dotted"), [("1/3", "0.333..."), ("4/33", r"0.1212\ldots"), ("1/6", "0.1666...")]
)
def test_dots_behind_decimals_repeat_what_repeats(number, dotted):
    assert ALONE.score(rf"\boxed{{{dotted}}}", {"answer": number}).outcome == "correct"
    assert ALONE.score(rf"\boxed{{{number}}}", {"answer": dotted}).outcome == "correct"
    assert ALONE.score(r"\boxed{3.14...}", {"answer": r"\pi"}).outcome != "correct"


def test_a_percentage_answers_a_whole_number_only_where_one_was_asked_for():
    item = {"answer": "5"}
    assert ALONE.score("5%", item).outcome == "correct"
    assert ALONE.score("5%", {**item, "question": "What percentage is it?"}).outcome == "correct"
    assert ALONE.score("5%", {**item, "question": "How many are there?"}).outcome == "wrong"


def test_any_of_several_references_will_do():
    task = {"answer": ["1/2", "50%", "x^2"]}
    assert [ALONE.score(said, task).outcome for said in ("0.5", r"\boxed{x^2}", "7")] == [
        "correct",
        "correct",
        "error",
    ]
    assert ALONE.score("7", {"answer": ["1", "2"]}).outcome == "wrong"


def test_what_arithmetic_cannot_compare_is_no_wrong_answer():
    verdict = ALONE.score(r"\boxed{(x+1)^2}", {"answer": "x^2+2x+1"})
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert "install the extra math" in verdict.detail


@pytest.mark.parametrize(
    "reference", ["5", "1/2, 3", "London", r"\begin{pmatrix}1&2\end{pmatrix}", r"\neq 4"]
)
def test_a_form_that_arithmetic_does_not_read_is_no_way_out_where_it_reads_the_reference(reference):
    verdict = ALONE.score(r"\boxed{x^{y}+\heartsuit}", {"answer": reference})
    assert (verdict.score, verdict.outcome in ("unparsable", "wrong")) == (0.0, True), verdict


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"answer": ""},
        {"answer": []},
        {"answer": True},
        {"answer": float("nan")},
        {"answer": [5, float("inf")]},
        {"answer": "5", "float_rounding": 99},
        {"answer": "5", "match_types": ["words"]},
        {"answer": "5", "match_types": [["latex"]]},
        {"answer": "5", "strict": "yes"},
    ],
)
def test_a_task_that_makes_no_sense_is_refused(task):
    assert ALONE.score("5", task).detail.startswith("bad_task: ")
    with pytest.raises(ValueError, match=r"must be|needs the field|cannot be"):
        ALONE.reset(options={"question": "2 + 3", **task})


@pytest.mark.parametrize(
    "kwargs", [{"kinds": []}, {"kinds": ["poems"]}, {"backend": "sympy"}, {"timeout_s": 0}, {"processes": 0}]
)
def test_bad_kwargs_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        MathEnv(**kwargs)


@pytest.mark.parametrize(
    "piece", ["\\(\n", "\\[", "$\n", "<answer>", "<think>", "\\boxed{", "1,000", "{", "A: ", "x="]
)
def test_what_goes_on_for_pages_is_judged_all_the_same(piece):
    assert ALONE.score(piece * 200_000, {"answer": "5"}).outcome != "correct"
    assert ALONE.score(piece * 200_000 + "\n</think>\\boxed{5}", {"answer": "5"}).outcome == "correct"


pieces = st.sampled_from(
    [*"0123456789+-*/^(){}[],.=$%\\ x\n", r"\frac", r"\boxed{", "<answer>", "</answer>", "<think>", r"\sqrt"]
)


@settings(max_examples=400)
@given(parts=st.lists(pieces, max_size=40), gold=st.sampled_from(["5", "1/2", "(1, 2)", "x+1", "abc"]))
def test_no_response_raises(parts, gold):
    verdict = ALONE.score("".join(parts), {"answer": gold})
    assert verdict.score == (1.0 if verdict.outcome == "correct" else 0.0)


@settings(max_examples=200)
@given(number=st.fractions(max_denominator=10**6), shift=st.integers(1, 5))
def test_a_number_equals_itself_in_every_form_and_no_other(number, shift):
    above, below = number.numerator, number.denominator
    forms = [str(number), rf"\frac{{{above}}}{{{below}}}", rf"\dfrac {{{above}}} {{{below}}}"]
    if below == 1:
        forms += [f"{above:,}", f"{above}.00", f"{above}^1"]
    for form in forms:
        assert rational(exact_number(form)) == number
        assert ALONE.score(rf"\boxed{{{form}}}", {"answer": str(number)}).outcome == "correct"
        assert ALONE.score(rf"\boxed{{{form}}}", {"answer": str(number + shift)}).outcome == "wrong"


@given(outside=st.integers(-50, 50), inside=st.integers(0, 400), other=st.integers(1, 30))
def test_roots_are_exact(outside, inside, other):
    value = exact_number(rf"{outside}\sqrt{{{inside}}}")
    assert (
        exact_number(rf"\frac{{{outside * other}\sqrt{{{inside * other * other}}}}}{{{other * other}}}")
        == value
    )
    assert rational(exact_number(rf"(\sqrt{{{inside}}})^2 + {outside}")) == Fraction(inside + outside)


@settings(max_examples=100)
@given(base=st.integers(2, 40), power=st.integers(-3000, 3000), below=st.integers(1, 9))
def test_large_powers_are_exact(base, power, below):
    said = rf"\frac{{{base}^{{{power}}}}}{{{below}}}"
    assert rational(exact_number(said)) == Fraction(base) ** power / below
    assert compare(said, rf"\frac{{{base}^{{{power + 1}}}}}{{{base * below}}}").equal
    assert compare(said, rf"\frac{{{base}^{{{power + 1}}}}}{{{below}}}").equal is False
    assert compare(said, rf"\frac{{{base}^{{{power}}}}}{{{below}}} + 2^{{-3000}}").equal is False


@pytest.mark.parametrize("text", ["", "1/0", "2^99999", "9" * 3000, "(" * 50 + "1" + ")" * 50, "1..2", "0^0"])
def test_what_is_no_exact_number(text):
    with pytest.raises(NotExact):
        exact_number(text)


def test_generated_tasks_keep_to_their_split_and_their_answers_are_right():
    for kind in KINDS:
        for split in ("train", "test"):
            environment = MathEnv(kinds=[kind], split=split, backend="none")
            for seed in range(20):
                prompt, _ = environment.reset(seed=seed)
                task = environment.task
                assert split_of_text(task["question"]) == split
                assert prompt == task["question"]
                assert environment.score(task["answer"], task).outcome == "correct"
                assert environment.score(prompt, task).outcome != "correct"


# -- recorded behaviour ------------------------------------------------------------------------------------------


def lines(name):
    return [json.loads(line) for line in recorded(name).read_text().splitlines()]


@pytest.mark.parametrize("with_options", [True, False])
def test_alone_it_has_no_false_positive_on_the_test_suite_of_math_verify(with_options):
    outcomes = []
    for case in lines("math_verify_testsuite.jsonl"):
        task = {"answer": case["gold"]} | ({name: case[name] for name in OPTIONS} if with_options else {})
        outcome = ALONE.score(case["pred"], task).outcome
        assert outcome != "correct" or case["expected"], case
        # Where it reads the reference and not the answer, the answer is not paid: nobody may choose not to be judged.
        assert not (with_options and case["expected"]) or outcome in ("correct", "error", "unparsable"), case
        outcomes.append(outcome)
    assert outcomes.count("correct") > 120


def test_behind_math_verify_it_agrees_with_all_of_its_test_suite():
    pytest.importorskip("math_verify")
    verifier = MathEnv(backend="math-verify", timeout_s=30)
    for case in lines("math_verify_testsuite.jsonl"):
        verdict = verifier.score(
            case["pred"], {"answer": case["gold"]} | {name: case[name] for name in OPTIONS}
        )
        assert (verdict.outcome == "correct") == case["expected"], (case, verdict)
        assert verdict.outcome in ("correct", "wrong", "unparsable")
    verifier.close()


def test_solutions_of_grade_school_problems_are_judged_as_they_were_labelled():
    for case in lines("gsm8k_labelled_solutions.jsonl"):
        for form in ("response", "response_boxed"):
            verdict = ALONE.score(case[form], {"answer": case["gold"]})
            assert (verdict.outcome == "correct") == case["is_correct"], (case, verdict)
            assert verdict.outcome in ("correct", "wrong", "unparsable")
