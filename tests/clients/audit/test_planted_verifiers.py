"""What an audit finds in verifiers with one defect each."""

from collections.abc import Iterator

import pytest

from tests.support.audits import Auditor, entry_of, faults
from tests.support.planted import verifiers

FAILED, WARNING = "failed", "warning"
PLANTED = [
    (
        "TellsItsTask",
        {
            "leaks: task at the reset": FAILED,
            'leaks: answer in info["state"]': FAILED,
            "leaks: answer told before the reply": FAILED,
        },
        ("task at the reset", "leaks", "info['state']['task'] holds its fields"),
    ),
    (
        "TellsItsAnswer",
        {"leaks: answer told before the reply": FAILED},
        ("answer told before the reply", "leaks", "the infos of 20 of 20 resets hold it"),
    ),
    (
        "PaysEcho",
        {
            "verifier: echo": FAILED,
            "baselines: echo": FAILED,
            "leaks: answer in the observation": FAILED,
        },
        ("echo", "verifier", "What is"),
    ),
    (
        "PaysHedging",
        {"verifier: hedged replies": FAILED},
        ("hedged replies", "verifier", "wherever the right one stands"),
    ),
    (
        "PaysAnyFence",
        {"verifier: hedged replies": FAILED},
        ("hedged replies", "verifier", "wherever the right one stands"),
    ),
    (
        "PaysSilence",
        {"verifier: empty reply": FAILED, "baselines: empty reply": FAILED},
        ("empty reply", "verifier", "'': paid in 20/20, 100%"),
    ),
    (
        "BeyondOne",
        {"verifier: scores in [0, 1]": FAILED, "rewards: in the declared range": FAILED},
        ("scores in [0, 1]", "verifier", "is scored 2.0"),
    ),
    (
        "ForgetsRepeats",
        {"verifier: same score in any company": FAILED, "verifier: reference answer": WARNING},
        ("same score in any company", "verifier", "1, then 0"),
    ),
    (
        "PaysTheWrong",
        {"verifier: outcomes": FAILED},
        ("outcomes", "verifier", "is wrong with the score 0.3"),
    ),
    (
        "AnswerInThePrompt",
        {
            "verifier: answer in the prompt": WARNING,
            "verifier: echo": FAILED,
            "baselines: echo": FAILED,
            "leaks: answer in the observation": FAILED,
        },
        ("answer in the prompt", "verifier", "answer stands in 20 of 20 prompts"),
    ),
]


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor.of(verifiers) as running:
        yield running


def test_nothing_is_wrong_with_what_has_no_defect(auditor: Auditor) -> None:
    card = auditor.audit("Products")
    assert faults(card) == {}
    assert entry_of(card, "reference answer")["detail"] == "answer, said as it is: paid in full in 20/20"


def test_functions_beside_the_one_that_is_wanted_are_no_hedge(auditor: Auditor) -> None:
    card = auditor.audit("Functions")
    assert faults(card) == {}
    assert "only one place is read" in entry_of(card, "hedged replies")["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected", "said"), PLANTED, ids=[each[0] for each in PLANTED])
def test_a_defect_is_found(
    auditor: Auditor, name: str, expected: dict[str, str], said: tuple[str, str, str]
) -> None:
    card = auditor.audit(name)
    assert faults(card) == expected
    check, section, fragment = said
    (entry,) = [each for each in card.entries if (each.check, each.section) == (check, section)]
    assert fragment in entry.detail
    assert entry.remedy


def test_a_constant_that_is_paid_is_found(auditor: Auditor) -> None:
    card = auditor.audit("PaysAConstant")
    assert faults(card)["verifier: constant reply"] == FAILED
    assert entry_of(card, "constant reply")["numbers"]["said"] == "42"


def test_scores_that_depend_on_their_order_are_found(auditor: Auditor) -> None:
    """Every fifth call is let pass, so that much else is paid by chance as well."""
    card = auditor.audit("CountsCalls")
    assert faults(card)["verifier: same score in any company"] == FAILED
    assert entry_of(card, "same score in any company")["numbers"]["how"] == "in reverse"


def test_tasks_of_the_caller_are_scored_in_place_of_drawn_ones(auditor: Auditor) -> None:
    items = [{"question": f"{one} times 3", "answer": str(3 * one)} for one in range(40, 70)]
    card = auditor.audit("Products", items=items)
    assert entry_of(card, "reference answer")["numbers"] == {"paid": 30, "items": 30, "field": "answer"}
