"""MultipleChoice-v0: one option is named, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.client.client import EnvClient
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv, read_choice
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
    "response",
    [
        *(
            "（Ｂ）",
            "Ｂ",
            "b) paris",
            "B - Paris",
            "B: Paris.",
            "Paris (B)",
            "Paris, option B",
            "Answer - B",
            "Letter B",
        ),
        *(
            "Paris is the capital of France, so B.",
            "答案：B",
            "答案是 B",
            "故选 B",
            r"\(B\)",
            "[B] Paris",
            "B)",
        ),
    ],
)
def test_further_ways_to_choose(response):
    verdict = ENVIRONMENT.score(response, CITIES)
    assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize(
    "response",
    [
        *(
            "A\nB",
            "(A)\n(B)",
            "A\nB\nC\nD",
            "**A** **B**",
            "(A) (B)",
            "A or B",
            "B or A",
            "B (Paris) or C (Rome)",
        ),
        *(
            r"\boxed{A}\boxed{B}",
            r"\boxed{B \text{ or } C}",
            "Paris or Rome",
            "neither B nor C",
            "anything but B",
        ),
        *("not option B", "It cannot be so, so not B", "I would not choose B.", "A, so B or C", "B) Rome"),
    ],
)
def test_several_answers_or_none_are_no_answer(response):
    assert ENVIRONMENT.score(response, CITIES).score == 0.0
    assert ENVIRONMENT.score(response, {**CITIES, "answer": "A"}).score == 0.0


@pytest.mark.parametrize(
    ("options", "answer", "response", "outcome"),
    [
        # A letter is asked for, even where another option has it for its text.
        (["B", "A"], "A", "A", "correct"),
        (["B", "A"], "B", "A", "wrong"),
        (["B", "A"], "A", "A) B", "correct"),
        (["C", "D", "A", "B"], "A", "(A)", "correct"),
        # Signs count where texts differ in them.
        (["C", "C++", "C#"], "B", "C++", "correct"),
        (["C", "C++", "C#"], "A", "C++", "wrong"),
        (["x > 1", "x < 1"], "A", "x > 1", "correct"),
        (["x > 1", "y"], "A", "x < 1", "unparsable"),
        (["(0,1)", "2"], "A", "[0,1]", "unparsable"),
        (["!p", "q"], "A", "p", "unparsable"),
        (["p && q", "p || q"], "A", "p || q", "wrong"),
        (["2^3", "2*3"], "B", "2*3", "correct"),
        (["C# is old", "C is old"], "A", "C is old", "wrong"),
        # What is equal is the same, and what is said in other units is not.
        (["1/2", "12"], "A", "0.5", "correct"),
        (["1,000", "1000.5"], "A", "1000", "correct"),
        (["5 m", "5 cm"], "A", "5 cm", "wrong"),
        (["50%", "50"], "A", "50", "wrong"),
    ],
)
def test_texts_of_options(options, answer, response, outcome):
    task = {"question": "Which?", "options": options, "answer": answer}
    assert ENVIRONMENT.score(response, task).outcome == outcome


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


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        ("Answer: Let's think step by step. A is in Germany. The answer is (B).", "B"),
        ("Answer: Let's think step by step.\n\nAnswer: B", "B"),
        ("Answer: Let's think step by step. I do not know.", ""),
        ("Answer seems to be A.\n\nAnswer: B", "B"),
        ("(C) is a codon.\nAnswer: $B", "B"),
        ("**Answer:** $(B)$", "B"),
    ],
)
def test_no_word_behind_the_mark_of_an_answer_is_a_letter(response, letters):
    options = dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "")
    assert "".join(read_choice(response, options)[0]) == letters


_CITIES = {"question": "Which?", "options": ["Berlin", "London", "Paris", "Rome"], "answer": "B"}


@pytest.mark.parametrize(
    "said",
    [
        *("A) London", r"\boxed{A) London}", "The answer is A) London", "<answer>A. London</answer>"),
        *("The answer is A London", "The answer is C) London", r"\boxed{(A) London}"),
    ],
)
def test_a_letter_beside_the_text_of_another_option_is_no_article(said):
    assert MultipleChoiceEnv().score(said, _CITIES).score == 0.0


def test_articles_before_a_word_mean_nothing_and_letters_do():
    task = {"question": "Who barks?", "options": ["a cat", "the dog"], "answer": "B"}
    assert MultipleChoiceEnv().score(r"\boxed{A) dog}", task).outcome == "wrong"
    assert MultipleChoiceEnv().score(r"\boxed{a dog}", task).outcome == "correct"
    assert MultipleChoiceEnv().score("The dog", task).outcome == "correct"


@pytest.mark.parametrize(
    "said",
    [
        *(
            r"The final answer is $\boxed{B}$. I hope it is correct.",
            "B) London\n\nBecause it is the capital.",
        ),
        *(
            "- B) London",
            "> B) London",
            '"B) London"',
            "Correct option: B) London",
            "B is correct.",
            r"\[B\]",
        ),
        *("Option B is correct.", "I think B", "It must be B.", "It is London.", "I think it is London."),
        *(r"$\text{B}$", "My choice is B", "My final answer is B", "答案是 B。", "选项B", '{"answer": "B"}'),
        *("B, because it is the capital.", "B because London is the capital", "**Option B**: London"),
        *("Option B) London is correct.", "London (B)", "**London (B)**", "B) London is the right answer."),
        *("B) London. It is the capital.", "B. London, because it is the capital.", "(B) London since 43."),
        *("**B) London.** It is the capital.", "B) London; it lies on the Thames.\n\nIt is large."),
        "The answer is B, not A.",
    ],
)
def test_the_right_option_is_read_in_a_sentence_and_a_line(said):
    assert MultipleChoiceEnv().score(said, _CITIES).outcome == "correct"


@pytest.mark.parametrize(
    "said",
    [
        *("The answer is B? No, C.", "B) London\n\nNo, wait, C) Paris.", "B) London\n\nWait, that is wrong."),
        *("It is not London.", "It is London or Paris", "B is not correct", "I think B is wrong"),
        *("The answer is B, no, C", "The answer is B. Wait, C.", "The answer is B (wrong)", "Paris (B)"),
        *("- A\n- B", "Berlin (A), London (B)", "Berlin (A)\nLondon (B)", "Berlin (A) or London (B)"),
        *("B, because it is not A. No, C.", "B because C is wrong", "A) London is correct."),
        *(
            "B) London. Or Paris.",
            "B) London. No, wait.",
            "B) London. Not it.",
            "B) Paris. It is the capital.",
        ),
        *("A) Berlin. B) London.", "B) London, because it is not Paris", "B) London? It is the capital."),
        *(
            "B) London\n\nOr Paris.",
            "- A) Berlin\n- B) London\n- C) Paris\n- D) Rome",
            "Option C is correct.",
        ),
    ],
)
def test_an_option_that_is_asked_taken_back_or_one_of_several_is_none(said):
    assert MultipleChoiceEnv().score(said, _CITIES).score == 0.0
