"""Arithmetic-v0, as an environment and as a verifier."""

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.client.client import EnvClient
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.arithmetic import ArithmeticEnv, number_given, value_of_question
from tests.support.processes import env_server

ENVIRONMENT = ArithmeticEnv()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("19", 19),
        ("12 + 7 = 19", 19),
        ("<answer>19</answer>", 19),
        ("<answer>18</answer>, no, <answer> 19 </answer>", 19),
        ("<think>18</think>19", 19),
        ("<think>19", None),
        ("\\boxed{19} and then 3", 19),
        ("<answer>19</answer> \\boxed{3}", 19),
        ("-7", -7),
        ("−7", -7),
        ("1,234", 1234),
        ("$1234$", 1234),
        ("19.0", None),
        ("<answer>nineteen</answer> 19", None),
        ("", None),
        ("no number", None),
        ("1" * 1000, None),
    ],
)
def test_reading(response, expected):
    assert number_given(response) == expected


@given(response=st.text())
def test_no_response_is_an_error(response):
    verdict = ENVIRONMENT.score(response, {"question": "2 + 2", "answer": "4"})
    assert verdict.outcome in ("correct", "wrong", "unparsable")
    assert verdict.score == (1.0 if verdict.outcome == "correct" else 0.0)


@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=2, max_size=6),
    operators=st.lists(st.sampled_from("+-*"), min_size=5, max_size=5),
)
def test_answers_are_exact(numbers, operators):
    question = str(numbers[0])
    for operator, number in zip(operators, numbers[1:], strict=False):
        question += f" {operator} {number}"
    assert value_of_question(question) == eval(question)


@pytest.mark.parametrize(
    "task",
    [
        {"question": "2 + 2", "answer": "four"},
        {"question": "2 + 2", "answer": 4.5},
        {"question": "2 + 2", "answer": True},
        {"question": "two and two"},
    ],
)
def test_an_answer_that_is_no_whole_number_is_a_fault_of_the_task(task):
    assert ENVIRONMENT.score("4", task).outcome == "error"
    with pytest.raises(ValueError, match=r"is no whole number|is no question"):
        ENVIRONMENT.reset(options=task)


def test_an_answer_that_is_not_given_is_computed():
    assert ENVIRONMENT.score("4", {"question": "2 + 2", "answer": None}).outcome == "correct"


def test_an_item_without_a_task_is_told_so():
    verdict = ENVIRONMENT.score("4", {})
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert "neither a question nor an answer" in verdict.detail


@pytest.mark.parametrize("question", ["2", "2 / 2", "2 + x", "__import__('os')", "2 + 2 ", "9" * 99 + " + 1"])
def test_what_is_no_question_is_refused(question):
    with pytest.raises(ValueError, match="no question"):
        value_of_question(question)


def test_an_episode_is_one_step():
    environment = ArithmeticEnv(digits=1, terms=3, operators="*")
    observation, info = environment.reset(seed=4)
    assert info["instruction"]
    answer = environment.task["answer"]
    assert observation == f"{environment.task['question']} = ?"
    _, reward, terminated, truncated, info = environment.step(f"<answer>{answer}</answer>")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    check_env(ArithmeticEnv(render_mode="ansi"))


def test_splits_and_seeds():
    questions = {}
    for split in ("train", "valid", "test"):
        environment = ArithmeticEnv(split=split, digits=3)
        for seed in range(30):
            question = environment.reset(seed=seed, options={"expert": True})[1]["state"]["task"]["question"]
            assert split_of_text(question) == split
            assert questions.setdefault(question, split) == split
            assert (
                environment.reset(seed=seed, options={"expert": True})[1]["state"]["task"]["question"]
                == question
            )


@pytest.mark.parametrize(
    "kwargs", [{"terms": 1}, {"digits": 0}, {"operators": "/"}, {"render_mode": "human"}]
)
def test_bad_kwargs_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        ArithmeticEnv(**kwargs)


async def test_the_same_scorer_answers_over_the_wire():
    items = [
        {"response": "<answer>4</answer>", "question": "2 + 2", "answer": "4"},
        {"response": "5", "question": "2 + 2"},
        {"response": "?", "question": "2 + 2", "answer": "4"},
    ] * 50
    with env_server() as url:
        async with EnvClient(url) as client:
            verdicts = await client.verify("Arithmetic-v0", items)
            session = await client.make("Arithmetic-v0")
            observation, _ = await session.reset(options={"question": "20 - 1"})
            assert observation == "20 - 1 = ?"
            assert (await session.step("19"))[1] == 1.0
    assert [verdict.outcome for verdict in verdicts] == ["correct", "wrong", "unparsable"] * 50
    assert [verdict.score for verdict in verdicts[:3]] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "said",
    [
        *("12!", "12²", "12%", r"12\%", "12th", "not 12", "1e12", "12/5", "x12", "12 million"),
        *("12?", "±12", "12+i", "(12)!", "12 is wrong", "12 (wrong)", "12 !", "11 or 12", "11, 12", "12..14"),
    ],
)
def test_a_number_that_is_part_of_another_or_denied_is_none(said):
    assert number_given(said) is None
    assert number_given(f"<answer>{said}</answer>") is None


@pytest.mark.parametrize(
    "said",
    ["–7", "- 7", "−7", "It is - 7.", "5 - 12 = - 7", r"\boxed{–7}", "**-7**", "The sum is -7!", "minus 7"],
)
def test_a_sign_counts_in_any_of_its_forms(said):
    assert number_given(said) == -7


def test_a_difference_is_no_negative_number():
    assert number_given("12 - 7") == 7
    assert number_given("12 -7") is None
    assert number_given("-(7)") is None
    assert number_given("between 6 and 7") is None
    assert number_given(r"<answer>\boxed{-7}</answer>") == -7
