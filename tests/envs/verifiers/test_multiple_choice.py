"""MultipleChoice-v0: one option is named, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.client.client import EnvClient
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv
from tests.support.processes import env_server

ENVIRONMENT = MultipleChoiceEnv()
CITIES = {"question": "Capital of France?", "options": ["Berlin", "Paris", "Rome", "A Coruña"], "answer": "B"}


@pytest.mark.parametrize(
    "response",
    [
        *(
            "B",
            "(B)",
            "B.",
            "**B**",
            r"\boxed{B}",
            r"\boxed{\text{(B)}}",
            "<answer>b</answer>",
            "Paris",
            "paris.",
        ),
        *(
            "The answer is (B).",
            "The answer is B) Paris",
            "Answer: **B**",
            "Answer: Option B",
            r"\boxed{Paris}",
        ),
        *(
            "<think>(A)? (C)?</think>(B)",
            "(A) is wrong. (B) is right.",
            "Rome is in Italy.\nB",
            "A: no\n**B.**",
        ),
        *(
            "The answer is B, not A.",
            "The answer is (B) because A is in Germany",
            "<answer>B: Paris</answer>",
        ),
        *(
            *(
                "B) Paris",
                "B. Paris",
                "**B. Paris**",
                "Rome is in Italy.\nB) Paris",
                "Option B",
                "I choose B.",
            ),
            *("So B.", "The correct option is B", "Therefore, the answer is B.", "I would go with (B)."),
            "The answer is the correct option B",
            r"\boxed{A} no, \boxed{B}",
            "answer: `B`",
            "<answer>Paris</answer>",
        ),
    ],
)
def test_the_right_option_is_read(response):
    verdict = ENVIRONMENT.score(response, CITIES)
    assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize(
    ("response", "outcome", "reason"),
    [
        ("A", "wrong", "letter"),
        ("A Coruña", "wrong", "text"),
        ("B) Rome", "unparsable", "no_choice"),
        ("A) Berlin\nB) Paris", "unparsable", "no_choice"),
        ("not B", "unparsable", "no_choice"),
        ("So not B.", "unparsable", "no_choice"),
        ("I choose A.", "wrong", "letter"),
        ("The answer is A Coruña", "wrong", "phrase"),
        ("The answer is A or B", "unparsable", "no_choice"),
        ("The answer is (A) or (B)", "wrong", "ambiguous"),
        ("<answer>B, C</answer>", "wrong", "ambiguous"),
        ("<answer>B) Rome</answer>", "wrong", "ambiguous"),
        ("either (A) or (B)", "wrong", "ambiguous"),
        ("I think so", "unparsable", "no_choice"),
        ("Because of that", "unparsable", "no_choice"),
        ("A dog", "unparsable", "no_choice"),
        (r"\boxed{E}", "unparsable", "no_choice"),
        (r"\boxed{}", "unparsable", "no_choice"),
        ("<answer>Between you and me</answer>", "unparsable", "no_choice"),
        ("", "unparsable", "no_choice"),
        ("<think>(B)", "unparsable", "no_choice"),
    ],
)
def test_what_is_not_the_right_option(response, outcome, reason):
    verdict = ENVIRONMENT.score(response, CITIES)
    assert (verdict.score, verdict.outcome, verdict.detail.split(":")[0]) == (0.0, outcome, reason)


@pytest.mark.parametrize(
    "task",
    [
        {"answer": 1},
        {"answer": "paris"},
        {"answer": "(b)"},
        {"options": {"A": "Berlin", "B": "Paris"}},
        {"choices": ["Berlin", "Paris"], "options": None},
        {"options": None},
    ],
)
def test_options_and_answers_come_in_many_forms(task):
    fields = {name: value for name, value in ({**CITIES} | task).items() if value is not None}
    assert ENVIRONMENT.score("(B)", fields).outcome == "correct"
    assert "Capital" in ENVIRONMENT.reset(options=fields)[0]


@pytest.mark.parametrize(
    "task", [{}, {"answer": "E"}, {"answer": 4}, {"answer": "London"}, {"answer": "B", "options": ["x"]}]
)
def test_a_task_that_makes_no_sense_is_refused(task):
    fields = {"question": "?", "options": CITIES["options"], **task}
    assert ENVIRONMENT.score("B", fields).detail.startswith("bad_task: ")
    with pytest.raises(ValueError, match="must be"):
        ENVIRONMENT.reset(options=fields)


@given(response=st.text(st.sampled_from("ABCDE()*.\n <answer>/boxed{}\\ oris"), max_size=60))
def test_no_response_raises(response):
    verdict = ENVIRONMENT.score(response, CITIES)
    assert verdict.score == (1.0 if verdict.outcome == "correct" else 0.0)


def test_generated_questions_have_one_right_option():
    for split in ("train", "test"):
        environment = MultipleChoiceEnv(split=split, options=5)
        for seed in range(40):
            prompt, _ = environment.reset(seed=seed)
            task = environment.task
            assert split_of_text(f"{task['question']} {task['options']}") == split
            assert len(set(task["options"])) == 5
            assert all(f") {option}" in prompt for option in task["options"])
            numbers = [int(option) for option in task["options"]]
            right = numbers["ABCDE".index(task["answer"])]
            match task["question"].rstrip("?").split():
                case [*_, "largest"]:
                    assert right == max(numbers)
                case [*_, "smallest"]:
                    assert right == min(numbers)
                case [*_, "multiple", "of", divisor]:
                    assert [each for each in numbers if each % int(divisor) == 0] == [right]
                case [*_, remainder, "when", "divided", "by", divisor]:
                    assert [each for each in numbers if each % int(divisor) == int(remainder)] == [right]
                case _:
                    raise AssertionError(task["question"])


def test_bad_kwargs_are_refused():
    with pytest.raises(ValueError, match="options must be a whole number from 2 to 10"):
        MultipleChoiceEnv(options=11)


async def test_it_scores_over_the_wire():
    with env_server("--workers", "1") as url:
        async with EnvClient(url) as client:
            verdicts = await client.verify(
                "MultipleChoice-v0", [{**CITIES, "response": said} for said in ("(B)", "(A)", "?")]
            )
    assert [verdict.outcome for verdict in verdicts] == ["correct", "wrong", "unparsable"]
