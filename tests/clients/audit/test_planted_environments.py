"""What an audit finds in environments with one defect each: that one, and nothing that does not follow from it."""

import re
from collections.abc import Iterator

import pytest

from rollgym.clients.audit.card import CardVerdict
from rollgym.clients.audit.costs import audit_costs
from tests.support.audits import Auditor, entry_of, faults
from tests.support.planted import environments

FAILED, WARNING = "failed", "warning"
NOT_AS_DECLARED = {"determinism: declares it": FAILED}

DETERMINISM = [
    (
        "UnseededReset",
        {"determinism: same again": FAILED, "determinism: in another process": FAILED} | NOT_AS_DECLARED,
        ("same again", "not deterministic: 8 of 8 episodes differ in observation"),
    ),
    (
        "GlobalGenerator",
        {"determinism: beside other sessions": FAILED} | NOT_AS_DECLARED,
        ("beside other sessions", "leak across sessions that take turns"),
    ),
    (
        "ClassCounter",
        {"determinism: same again": FAILED} | NOT_AS_DECLARED,
        ("same again", "leak across sessions, since a fresh process agrees"),
    ),
    (
        "KeepsItsPast",
        {"determinism: after other episodes": FAILED} | NOT_AS_DECLARED,
        ("after other episodes", "leak across episodes: 8 of 8 episodes differ in observation"),
    ),
    (
        "PaysLessLater",
        {"determinism: after other episodes": FAILED} | NOT_AS_DECLARED,
        ("after other episodes", "episodes differ in reward, first"),
    ),
    (
        "HashSeed",
        {"determinism: in another process": FAILED} | NOT_AS_DECLARED,
        ("in another process", "differs in a fresh process with another hash seed"),
    ),
    (
        "Clock",
        {"determinism: played slowly": FAILED} | NOT_AS_DECLARED,
        ("played slowly", "depends on the wall clock: 8 of 8 episodes differ in reward"),
    ),
    (
        "Modest",
        {"determinism: declares it": WARNING},
        ("declares it", "not declared deterministic, and looks as if it were"),
    ),
]

PAID = [
    (
        "AnswerInObservation",
        {"leaks: answer in the observation": FAILED},
        ("answer in the observation", "of the observation, said back: 40/40 solved"),
    ),
    (
        "PointsTheWay",
        {"leaks: answer in the observation": FAILED},
        ("answer in the observation", "observation[2], said back: 40/40 solved"),
    ),
    (
        "AnswerInInfo",
        {"leaks: answer in info": FAILED},
        ("answer in info", "info['debug']['target'], said back: 40/40 solved"),
    ),
    (
        "SolutionInInfo",
        {"leaks: answer in info": FAILED},
        ("answer in info", "info['plan'], one after the other, said back: 40/40 solved"),
    ),
    (
        "AnswerInState",
        {'leaks: answer in info["state"]': FAILED},
        ('answer in info["state"]', "info['state']['answer'], said back: 40/40 solved"),
    ),
    (
        "PaysAConstant",
        {"baselines: constant action": FAILED},
        ("constant action", "always 'yes': 20/20 solved, 100% [84%, 100%]"),
    ),
    (
        "PaysEcho",
        {"baselines: echo": FAILED, "leaks: answer in the observation": FAILED},
        ("echo", "10/10 solved"),
    ),
    ("PaysSilence", {"baselines: empty reply": FAILED}, ("empty reply", "10/10 solved")),
    ("OneTask", {"baselines: blind": WARNING}, ("blind", "one sequence: 20/20 solved")),
    (
        "TooEasy",
        {"baselines: constant action": FAILED, "baselines: blind": WARNING},
        ("constant action", "20/20 solved"),
    ),
]

REWARDS = [
    ("NotANumber", {"rewards: finite": FAILED}, ("finite", "the reward is nan")),
    (
        "BeyondItsRange",
        {"rewards: in the declared range": FAILED},
        ("in the declared range", "paid from 0 to 5, declared from 0 to 1"),
    ),
    (
        "PaysAnyway",
        {"rewards: depends on the play": FAILED},
        ("depends on the play", "are paid 1.5, solved or not"),
    ),
    (
        "PaysFailure",
        {"rewards: agrees with success": FAILED},
        ("agrees with success", "return 0 where solved"),
    ),
    (
        "AlwaysSuccess",
        {
            "rewards: agrees with success": FAILED,
            "baselines: random": WARNING,
            "baselines: constant action": FAILED,
            "baselines: empty reply": FAILED,
            "baselines: echo": FAILED,
            "baselines: blind": WARNING,
        },
        ("agrees with success", "end with success, those of who never reads too"),
    ),
]

CONFORMANCE = [
    (
        "SolvedBeforeItBegins",
        {"conformance: nothing is solved at the reset": FAILED},
        ("nothing is solved at the reset", "reset with seed"),
    ),
    (
        "OutOfSpace",
        {"conformance: observations in the space": FAILED},
        ("observations in the space", "gives array(["),
    ),
    (
        "GoesOn",
        {"conformance: ends at its limit": FAILED, "difficulty: expert": WARNING},
        ("ends at its limit", "an episode goes on after 3 steps"),
    ),
    (
        "LimitAsTheEnd",
        {"conformance: ends at its limit": WARNING},
        ("ends at its limit", "end at step 3 as terminated, none as truncated"),
    ),
    (
        "AnythingIsValid",
        {"conformance: action_is_valid": FAILED},
        ("action_is_valid", "is called valid, and is not listed"),
    ),
    (
        "RaisesOnOddReplies",
        {"conformance: odd replies": FAILED},
        ("odd replies", "env_error: ValueError: too long"),
    ),
    (
        "SaysNothing",
        {"conformance: instruction": FAILED, "conformance: success": FAILED},
        ("instruction", "gives None"),
    ),
]

# One of each kind is looked for with every change; the others are among the slow tests.
OFTEN = frozenset({"UnseededReset", "AnswerInObservation", "AlwaysSuccess", "RaisesOnOddReplies"})
PLANTED = [*DETERMINISM, *PAID, *REWARDS, *CONFORMANCE]


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor.of(environments) as running:
        yield running


def test_nothing_is_wrong_with_what_has_no_defect(auditor: Auditor) -> None:
    card = auditor.audit("Sums")
    assert faults(card) == {}
    assert entry_of(card, "expert")["numbers"]["rate"] == 1.0
    assert entry_of(card, "random")["numbers"]["rate_high"] < 0.5


@pytest.mark.slow
def test_what_is_not_deterministic_may_say_so(auditor: Auditor) -> None:
    card = auditor.audit("Honest")
    assert faults(card) == {}
    assert "as it declares" in entry_of(card, "same again")["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "said"),
    [pytest.param(*each, id=each[0], marks=() if each[0] in OFTEN else pytest.mark.slow) for each in PLANTED],
)
def test_a_defect_is_found(
    auditor: Auditor, name: str, expected: dict[str, str], said: tuple[str, str]
) -> None:
    card = auditor.audit(name)
    assert faults(card) == expected
    check, fragment = said
    entry = entry_of(card, check)
    assert fragment in entry["detail"]
    assert entry["remedy"]


@pytest.mark.slow
def test_memory_that_grows_with_every_episode_is_found(auditor: Auditor) -> None:
    card = auditor.audit("Hoards")
    assert faults(card) == {"costs: memory": FAILED}
    entry = entry_of(card, "memory")
    assert 150_000 < entry["numbers"]["bytes_per_episode"] < 400_000
    assert "every episode adds to" in entry["remedy"]


@pytest.mark.slow
def test_episodes_that_never_end_are_found(auditor: Auditor) -> None:
    card = auditor.audit("NeverEnds", episodes=4)
    assert faults(card) == {"conformance: ends at its limit": WARNING}
    entry = entry_of(card, "ends at its limit")
    assert entry["detail"] == "no limit is declared, and no episode ended in 300 steps"
    assert "max_episode_steps" in entry["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        ("LooksBack", "a megabyte holds nobody up", "'a' over and over"),
        ("BroodsAtReset", "reset holds nobody up", r" ms at most, of \d+ seeds"),
        ("SleepsAtReset", "reset holds nobody up", r" ms at most, of \d+ seeds"),
    ],
)
def test_who_holds_up_the_server_is_found(auditor: Auditor, name: str, check: str, said: str) -> None:
    entry = auditor.part(name, audit_costs)[check]
    assert entry.verdict is CardVerdict.FAILED
    assert re.search(said, entry.detail)
    assert entry.numbers["slowest_ms"] >= entry.numbers["limit_ms"] == 50
    assert "everybody on the server waits" in entry.remedy


@pytest.mark.slow
def test_nobody_waits_for_what_runs_elsewhere(auditor: Auditor) -> None:
    costs = auditor.part("Sums", audit_costs)
    for check in ("reset holds nobody up", "a megabyte holds nobody up"):
        assert costs[check].verdict is CardVerdict.OK
        assert "runs in a process" in costs[check].detail
