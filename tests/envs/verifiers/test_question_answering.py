"""QA-v0: each metric, and the one that a reference asks for."""

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.question_answering import (
    KINDS,
    QuestionAnsweringEnv,
    normal,
    overlap,
    read_boolean,
    read_date,
)

ENVIRONMENT = QuestionAnsweringEnv()


@pytest.mark.parametrize(
    ("reference", "response", "metric", "score"),
    [
        ("The Eiffel Tower", "<answer>eiffel tower!</answer>", "exact", 1),
        ("The Eiffel Tower", "It is the Eiffel Tower in Paris", "exact", 0),
        ("The Eiffel Tower", "It is the Eiffel Tower in Paris", "contains", 1),
        ("Art", "<answer>a party</answer>", "contains", 0),
        ("the big red dog", "<answer>red dog</answer>", "f1", 0.8),
        ("dog", "<answer>cat</answer>", "f1", 0),
        ("3.14", "<answer>3.140</answer>", "number", 1),
        ("1,000 km", "<answer>about 1000 km in all</answer>", "number", 1),
        ("1/3", "<answer>0.3</answer>", "number", 0),
        ("5", "<answer>5 or 6</answer>", "number", 0),
        ("5", "5, 6", "auto", 0),
        ("5000000", "<answer>5 million</answer>", "number", 1),
        ("5 million", "5,000,000 people", "number", 1),
        ("5 March 2024", "<answer>2024-03-05</answer>", "date", 1),
        ("5 March 2024", "<answer>2024-03-06</answer>", "date", 0),
        ("True", "<answer>True.</answer>", "boolean", 1),
        ("no", "False", "boolean", 1),
        ("True", "True or False", "boolean", 0),
        ("Yes", "not true", "boolean", 0),
        ("maybe", "<answer>Maybe.</answer>", "auto", 1),
        ("maybe", "<answer>yes</answer>", "auto", 0),
        ("2024-03-05", "The answer is March 5, 2024.", "auto", 1),
        ("42", "The answer is 42.0.", "auto", 1),
        ("false", r"\boxed{\text{False}}", "auto", 1),
        ("Ada", "<think>Bo</think>Ada", "auto", 1),
        ("Ada", "Ada or Bo", "auto", 0),
        ("!!", "<answer>!!</answer>", "exact", 1),
        ("!!", "<answer>?</answer>", "exact", 0),
        ("A", "<answer>the</answer>", "f1", 0),
        ("A", "<answer>...</answer>", "contains", 0),
        ("A", "<answer>A</answer>", "contains", 1),
    ],
)
def test_each_metric(reference, response, metric, score):
    verdict = ENVIRONMENT.score(response, {"answer": reference, "metric": metric})
    assert verdict.score == pytest.approx(score)
    assert verdict.outcome == ("correct" if score == 1 else "partial" if score else "wrong")


def test_what_a_number_is_counted_in_counts_unless_it_is_asked_for():
    for reference, said in (("5", "5 million"), ("5 million", "5")):
        for question, score in (("How many people?", 0.0), ("How many million people?", 1.0)):
            assert ENVIRONMENT.score(said, {"question": question, "answer": reference}).score == score


def test_tolerances_are_the_environments_or_the_tasks():
    loose = QuestionAnsweringEnv(metric="number", tolerance=0.5)
    task = {"answer": "10"}
    assert [loose.score(said, task).score for said in ("10.5", "10.6", "9.5")] == [1, 0, 1]
    assert loose.score("10.4", {**task, "tolerance": 0.1}).score == 0
    assert ENVIRONMENT.score("10.4", {**task, "relative_tolerance": 0.05}).score == 1


def test_any_of_several_answers_will_do():
    task = {"answers": ["Holland", "the Netherlands"]}
    assert ENVIRONMENT.score("<answer>Netherlands</answer>", task).outcome == "correct"
    assert ENVIRONMENT.score("<answer>Belgium</answer>", task).outcome == "wrong"
    assert ENVIRONMENT.score("<answer></answer>", task).outcome == "unparsable"


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"answers": []},
        {"answer": float("nan")},
        {"answers": ["5", float("inf")]},
        {"answer": "5", "metric": "vibes"},
        {"answer": "5", "tolerance": -1},
        {"answer": "five or six", "metric": "number"},
        {"answers": ["5", "several"], "metric": "number"},
        {"answer": "03/04/2024", "metric": "date"},
        {"answer": "next week", "metric": "date"},
        {"answer": "maybe", "metric": "boolean"},
    ],
)
def test_a_task_that_makes_no_sense_is_refused(task):
    assert ENVIRONMENT.score("5", task).detail.startswith("bad_task: ")
    with pytest.raises(ValueError, match=r"must be|needs the field"):
        ENVIRONMENT.reset(options={"question": "?", **task})


@pytest.mark.parametrize("kwargs", [{"metric": "vibes"}, {"tolerance": -1}, {"kinds": ()}, {"kinds": ("x",)}])
def test_bad_kwargs_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        QuestionAnsweringEnv(**kwargs)


@given(day=st.dates(datetime.date(1000, 1, 1), datetime.date(9999, 12, 31)))
def test_a_day_is_read_in_every_form(day):
    name = day.strftime("%B")
    forms = [
        day.isoformat(),
        f"{name} {day.day}, {day.year:04}",
        f"the {day.day}th of {name[:3]} {day.year:04}",
        f"{day.day}.{day.month}.{day.year:04}",
        f"{day.strftime('%A')}, {day.day} {name} {day.year:04}",
    ]
    assert {read_date(form) for form in forms} == {day}
    slashes = read_date(f"{day.month}/{day.day}/{day.year:04}")
    assert slashes == (day if day.day > 12 or day.day == day.month else None)


@pytest.mark.parametrize(
    "text", ["", "2024", "March 2024", "2024-13-01", "31 February 2024", "03/04/2024", "5"]
)
def test_what_is_no_day(text):
    assert read_date(text) is None


@settings(max_examples=50)
@given(one=st.text(max_size=30), other=st.text(max_size=30))
def test_overlap_is_symmetric_and_full_for_equal_texts(one, other):
    one, other = normal(one), normal(other)
    assert overlap(one, other) == pytest.approx(overlap(other, one))
    assert overlap(one, one) == 1.0
    assert 0.0 <= overlap(one, other) <= 1.0


@given(response=st.text(max_size=80), reference=st.text(min_size=1, max_size=20))
def test_no_response_raises(response, reference):
    verdict = ENVIRONMENT.score(response, {"answer": reference})
    assert 0.0 <= verdict.score <= 1.0


def test_true_and_false():
    assert [read_boolean(text) for text in ("yes", "It is not true.", "true, no, false", "maybe")] == [
        True,
        False,
        None,
        None,
    ]


def test_generated_tasks_keep_to_their_split_and_pay_their_answers():
    for kind in KINDS:
        for split in ("train", "valid"):
            environment = QuestionAnsweringEnv(kinds=(kind,), split=split)
            for seed in range(20):
                prompt, _ = environment.reset(seed=seed)
                task = environment.task
                assert split_of_text(prompt) == split
                assert environment.score(f"<answer>{task['answer']}</answer>", task).outcome == "correct"
    question, _ = QuestionAnsweringEnv(kinds=("date",)).reset(seed=1)
    days, start = int(question.split()[3]), datetime.date.fromisoformat(question.split()[-1].rstrip("?"))
    expected = start + datetime.timedelta(days=days)
    assert ENVIRONMENT.score(expected.strftime("%d %B %Y"), {"answer": expected.isoformat()}).score == 1


@pytest.mark.parametrize(
    ("reference", "said", "score"),
    [
        ("80779853376", "80779853377", 0),
        ("80,779,853,376", "80779853376.0", 1),
        ("9007199254740993", "9007199254740992", 0),
        ("1" + "0" * 400, "2" + "0" * 400, 0),
        ("1" + "0" * 400, "1" + "0" * 400, 1),
        ("0.3333333333", "1/3", 1),
        (r"\sqrt{2}", "1.4142135623", 1),
        (r"\sqrt{2}", "9" * 400, 0),
    ],
)
def test_whole_numbers_are_equal_to_their_last_digit(reference, said, score):
    verdict = ENVIRONMENT.score(f"<answer>{said}</answer>", {"answer": reference, "metric": "number"})
    assert verdict.score == score


def test_a_tolerance_is_the_number_that_was_written():
    task = {"answer": "1", "metric": "number", "tolerance": 0.3}
    assert [ENVIRONMENT.score(said, task).score for said in ("1.3", "0.7", "1.31", "-5")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("5 kHz", "5 MHz"), ("5 mol", "5 mmol"), ("$100", "100%"), ("x>5", "x<5"), ("Na+", "Na-")),
        *(
            ("C++", "C#"),
            ("C++", "C"),
            ("5!", "5"),
            ("5 m", "5 cm"),
            ("12 m", "12 s"),
            ("5 apples", "5 pears"),
        ),
        *(("5:30", "5.30"), ("1:2", "12"), ("1,2", "12"), ("192.168.0.1", "19216801"), ("v1.2.3", "v12.3")),
        *(("~p", "p"), ("!p", "p"), ("a*b", "a/b"), ("a^b", "a|b"), ("[1,2]", "(1,2)"), ("[1,2)", "[1,2]")),
        *(("1%", "1‰"), ("twenty-one", "22"), ("@x", "#x")),
    ],
)
def test_signs_and_units_make_another_answer(one, other):
    for gold, said in ((one, other), (other, one)):
        verdict = QuestionAnsweringEnv().score(f"<answer>{said}</answer>", {"question": "q", "answer": gold})
        assert verdict.score == 0.0, (gold, said)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("5 m", "500 cm"), ("5 km", "5000 m"), ("0 °C", "32 °F"), ("3rd", "third"), ("12", "twelve")),
        *(("Yahoo!", "Yahoo"), ("Na+", "na+"), ("Paris", "**Paris**"), ("C++", "c++.")),
        *(
            ("Schindler's List", "Schindler’s List"),
            ("well-known", "well–known"),
            ("“x”", "x"),
            ("北京。", "北京"),
        ),
        *(
            ("twenty-one", "21"),
            ("two hundred", "200"),
            ("[1, 2]", "[1,2]"),
            ("U.S.", "US"),
            ("and/or", "andor"),
        ),
        *(("AT&T", "ATT"), ("O'Brien", "OBrien"), ("1,000 men", "1000 men")),
    ],
)
def test_what_is_said_in_another_way_is_the_same(one, other):
    for gold, said in ((one, other), (other, one)):
        verdict = QuestionAnsweringEnv().score(f"<answer>{said}</answer>", {"question": "q", "answer": gold})
        assert verdict.outcome == "correct", (gold, said)


@pytest.mark.parametrize(
    "said",
    [
        r"5 \le x \le 7",
        "5..7",
        r"5 \pm 2",
        r"5\text{ or }6",
        r"5,\text{ but maybe }6",
        "5:6:7",
        r"5 \cup 6",
        "5+0x",
    ],
)
def test_a_number_in_a_formula_is_not_its_value(said):
    assert QuestionAnsweringEnv().score(rf"\boxed{{{said}}}", {"question": "q", "answer": "5"}).score == 0.0


def test_a_percentage_is_a_share_and_no_number_a_hundred_times_as_large():
    def score(gold, said, question="q"):
        return (
            QuestionAnsweringEnv()
            .score(f"<answer>{said}</answer>", {"question": question, "answer": gold})
            .score
        )

    assert [score("5%", said) for said in ("5%", "5", "0.05", "0.5")] == [1, 1, 1, 0]
    assert [score("5", said) for said in ("5", "5%", "500%")] == [1, 0, 1]
    assert [score("5", said, "How many percent?") for said in ("5", "5%")] == [1, 1]


def test_a_number_of_any_length_is_compared_and_never_an_error():
    for said in ("1" * 20_000, "5 " + "m " * 50_000, "twelve " * 20_000):
        for gold in ("5", "5 m", "12"):
            assert QuestionAnsweringEnv().score(said, {"question": "q", "answer": gold}).outcome == "wrong"
