"""Example replies: who is said to have found no reward, and that `roll-env check` plays them."""

from collections.abc import Iterator

import pytest

from rollgym.clients.checks.declared import check_examples
from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget
from tests.support import letter_envs
from tests.support.audits import Auditor, entry_of

DEPENDS = "depends on the play"


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor.of(letter_envs) as running:
        yield running


@pytest.mark.slow
def test_where_only_the_audits_players_found_nothing_it_says_so(auditor: Auditor) -> None:
    entry = entry_of(auditor.audit("Letters", episodes=100, budget_s=400), DEPENDS)
    assert entry["verdict"] == "warning"
    assert entry["remedy"].startswith("the audit's players did not find another reward")
    assert "metadata['example_replies']" in entry["remedy"]


@pytest.mark.slow
def test_example_replies_find_the_reward(auditor: Auditor) -> None:
    card = auditor.audit("LettersWithExamples", episodes=60)
    assert entry_of(card, DEPENDS)["verdict"] == "ok"
    assert entry_of(card, "example replies")["numbers"]["solved"] > 0


@pytest.mark.slow
def test_where_example_replies_earn_nothing_either_it_is_said_of_the_environment(auditor: Auditor) -> None:
    entry = entry_of(auditor.audit("NeverPaid", episodes=60), DEPENDS)
    assert entry["verdict"] == "warning"
    assert "nothing can be learned" in entry["remedy"]


def checked(name: str) -> list[Finding]:
    return list(check_examples(CheckTarget(f"{letter_envs.__name__}:{name}")))


def test_a_check_plays_each_example() -> None:
    assert checked("Letters") == []
    assert [(each.status, each.detail) for each in checked("LettersWithExamples")] == [
        (Status.PASS, "26 of them")
    ]


def test_an_example_that_is_not_valid_fails() -> None:
    (finding,) = checked("WrongExamples")
    assert finding.status is Status.FAIL
    assert finding.detail.startswith("'E' is not valid with seed 1:")


def test_examples_that_are_not_a_list_fail() -> None:
    (finding,) = checked("ExamplesAsText")
    assert finding.detail == "they are an empty list or a str"
