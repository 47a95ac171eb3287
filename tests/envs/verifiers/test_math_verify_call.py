"""Math-Verify behind Math-v0, in processes of its own: what takes too long, or hangs, is no verdict's end."""

import json

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.envs.verifiers.mathematics import MathEnv
from rollgym.envs.verifiers.symbolic import too_much
from tests.support.hostile_answers import ENDED_BY_A_CLOCK, FIVES, HOSTILE_ANSWERS
from tests.support.processes import env_server

ALONE = MathEnv(backend="none")

HANGING = HOSTILE_ANSWERS["a power of a sum"]


def test_an_answer_that_cannot_be_read_in_time_is_unparsable_and_the_next_one_is_judged(hasty):
    patient = MathEnv(backend="math-verify", timeout_s=30.0)
    task = {"answer": r"x^{2} + \sin(x)"}
    hung = hasty.score(rf"\boxed{{{HANGING}}}", task)
    assert (hung.score, hung.outcome) == (0.0, "unparsable")
    assert patient.score(r"\boxed{\sin(x) + x^{2}}", task).outcome == "correct"
    patient.close()


def test_a_reference_that_cannot_be_read_in_time_is_a_timeout(hasty):
    endless = r"\sum_{n=1}^{100000000} \frac{\sin(n)}{n^2} + \prod_{n=1}^{1000000} n"
    hung = hasty.score(r"\boxed{x}", {"answer": endless})
    assert (hung.score, hung.outcome, hung.detail.split(":")[0]) == (0.0, "timeout", "comparison_timeout")
    # It is known now, and nobody waits for it again.
    assert hasty.score(r"\boxed{y}", {"answer": ["2", endless]}).outcome == "timeout"


@pytest.mark.parametrize(
    "reference",
    ["???", r"\frac{", r"\foo\bar", "x +* ", r"$f: X \to Y$", r"\boxed{\frac{1}{}", r"x \geq", r"\neq"],
)
def test_a_reference_that_cannot_be_read_is_an_error_whatever_is_answered(hasty, reference):
    for said in ("5", r"\boxed{x}", r"\boxed{10^{10^{10}}}", r"\boxed{\text{yes}}"):
        verdict = hasty.score(said, {"answer": reference})
        assert (verdict.score, verdict.outcome, verdict.detail.split(":")[0]) == (
            0.0,
            "error",
            "unreadable_reference",
        )


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"\$x^2-1", r"\boxed{(x-1)(x+1)}", r"\boxed{(x-1)^2}"),
        (
            r"\begin{pmatrix}x^2-1\\3\end{pmatrix}",
            r"\boxed{\begin{pmatrix}(x-1)(x+1)\\3\end{pmatrix}}",
            r"\boxed{\begin{pmatrix}x\\3\end{pmatrix}}",
        ),
        (r"x^{2}", r"\boxed{x \cdot x}", r"\boxed{\neq x^2}"),
        ("#### \\$2x", r"\boxed{x+x}", r"\boxed{x}"),
    ],
)
def test_references_that_math_verify_must_be_given_as_formulas(hasty, reference, right, wrong):
    assert hasty.score(right, {"answer": reference}).outcome == "correct"
    assert hasty.score(wrong, {"answer": reference}).outcome in ("wrong", "unparsable")


@pytest.mark.parametrize(
    "reference", ["5", "x^2+3x+2", r"\begin{pmatrix}1\\2\end{pmatrix}", "(1, 2)", "London"]
)
def test_no_answer_ends_a_verdict(hasty, reference):
    # Those that only a clock can end are tried once, elsewhere.
    for name, answer in HOSTILE_ANSWERS.items():
        if name in ENDED_BY_A_CLOCK:
            continue
        for verifier in (ALONE, hasty):
            for said in (rf"\boxed{{{answer}}}", answer, f"<answer>{answer}</answer>"):
                verdict = verifier.score(said, {"answer": reference})
                excused = verifier is ALONE and reference == "x^2+3x+2" and verdict.outcome == "error"
                assert excused or verdict.outcome in ("wrong", "unparsable", "correct"), (name, verdict)
                assert verdict.score == 0.0 or (name in FIVES and reference == "5"), (name, verdict)


POWERS = [
    *(
        f"a large power of a sum{how}"
        for how in ("", " in more brackets", " as a fraction", " as programs write it")
    ),
    *("a power of a power of a sum", "a power of a power", "a power of a choice", "a power of a chosen"),
    *("a power of a factorial", "a power of a long number", "a power of a sine", "a power of roots"),
    *("a root of a large number", "a cube root of a large number", "a root as a power"),
]


@pytest.mark.parametrize("name", POWERS)
def test_powers_and_roots_that_take_long_are_not_worked_out(name):
    assert "too large to be worked out" in (too_much(HOSTILE_ANSWERS[name], "5") or "")


def test_bounds_let_through_what_people_write():
    for answer in (
        *(
            r"2^{2023}",
            r"7^{100000}",
            r"e^{x^{2}}",
            r"10^{-34}",
            "1000!",
            "(n+1)! - (n-1)!",
            r"\binom{100}{50}",
            "x != 5!",
        ),
        *(
            r"\frac{1}{1+\frac{1}{1+\frac{1}{2}}}",
            r"\sqrt{2+\sqrt{2+\sqrt{2}}}",
            r"2^{10}^{2}",
            r"a^{b^{c}}",
            "9^{2^{3}}",
        ),
        *(
            r"10^{99999}",
            r"\frac{2^{99999}-1}{3}",
            r"(2^{2024}-1)^{2}",
            r"\left(\frac{2}{3}\right)^{100000}",
            r"\left(\frac{1+\sqrt{5}}{2}\right)^{2024}",
            r"(1+i)^{2024}",
            r"(-1)^{2023}",
            r"(x^{2}+1)^{100}",
            r"\frac{x^{2024}-1}{x-1}",
            r"x_1^{2024} + x_2^{2024}",
            r"\binom{100}{50}^{200}",
            r"\sqrt{10^{1000}+1}",
            r"\sqrt[3]{x+1}",
            r"(x+1)^{\frac{1}{2}}",
            r"1.5^{100000}",
        ),
    ):
        assert too_much(answer, "5") is None, answer
    assert too_much(r"\int_0^x f(t) dt", r"\int_0^x f(t) \, dt + C") is None
    assert too_much(r"\int_0^x f(t) dt", "5") is not None


async def test_it_scores_over_the_wire_and_in_sessions():
    pytest.importorskip("math_verify")
    items = [
        {"response": r"\boxed{0.5}", "answer": r"\frac{1}{2}", "question": "?"},
        {"response": r"\boxed{(x+1)^2}", "answer": "x^2+2x+1"},
        {"response": r"\boxed{(x+2)^2}", "answer": "x^2+2x+1"},
        {"response": "I do not know.", "answer": "4"},
    ]
    hostile = [{"response": rf"\boxed{{{each}}}", "answer": "x^2+3x+2"} for each in HOSTILE_ANSWERS.values()]
    kwargs = json.dumps({"timeout_s": 2})
    with env_server("--workers", "1", "--operator-kwargs", f"Math-v0={kwargs}") as url:
        async with EnvClient(url) as client:
            verdicts = await client.verify("Math-v0", items)
            judged = await client.verify("Math-v0", hostile)
            session = await client.make("Math-v0", {"split": "train", "kinds": ["root"]})
            with pytest.raises(ProblemError, match="allow_expert"):
                await session.reset(seed=3, options={"expert": True})
            await session.reset(seed=3)
            ours = MathEnv(split="train", kinds=["root"], backend="none")
            ours.reset(seed=3)
            _, reward, terminated, _, info = await session.step(rf"\boxed{{{ours.task['answer']}}}")
            await session.reset(seed=3)
            *_, ended = await session.step(rf"\boxed{{{HANGING}}}")
    assert [verdict.outcome for verdict in verdicts] == ["correct", "correct", "wrong", "unparsable"]
    assert {verdict.outcome for verdict in judged} == {"wrong", "unparsable"}
    assert [verdict.detail.split(":")[0] for verdict in verdicts] == [
        "equal_numbers",
        "math_verify",
        "math_verify",
        "no_answer",
    ]
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert ended["outcome"] == "unparsable"
