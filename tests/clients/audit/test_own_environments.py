"""Our own environments have a clean card; what is said of one all the same is written down here, with its reason."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from rollgym.clients.audit.card import CardVerdict
from rollgym.envs.registry import builtin_environments
from tests.support.audits import Auditor, entry_of, faults
from tests.support.processes import ROOT
from tests.support.sandboxes import working_sandbox

ENVIRONMENTS = builtin_environments()
# Gymnasium's own environments say no success.
NO_SUCCESS = {"conformance: success": "warning"}


class Case(NamedTuple):
    """How an environment is asked, and what is said of it all the same."""

    episodes: int = 40
    kwargs: dict[str, Any] | None = None
    faults: dict[str, str] = {}
    not_asked: frozenset[str] = frozenset()


# An expert would be a search that takes longer than a step may.
NO_EXPERT = frozenset({"expert", "blind"})
# Where no single response is the right one, none stands in the task.
NO_REFERENCE = frozenset({"expert", "blind", "hedged replies", "reference answer"})
# Programs could tell the time, so nothing is promised that holds for those that are played here.
NO_PROMISE = {"determinism: declares it": "warning"}

CASES = {
    # Ten games take their time: the long ones are made short, and all are played less often.
    **dict.fromkeys(("Bandit-v0", "Countdown-v0", "GuessNumber-v0", "Mastermind-v0", "Maze-v0"), Case(12)),
    "TowerOfHanoi-v0": Case(12),
    "Game2048-v0": Case(12, {"size": 3, "target": 32}, not_asked=NO_EXPERT),
    "Minesweeper-v0": Case(12, {"max_episode_steps": 30}),
    "Sudoku-v0": Case(12, {"max_episode_steps": 16}),
    # Luck decides there: the expert plays as well as one can, and loses more often than not.
    "Blackjack-v0": Case(12, faults={"difficulty: expert": "warning"}),
    # Conversations take many turns, and programs a process each.
    "Retail-v0": Case(12),
    "ToolUse-v0": Case(12),
    "ToolUsePython-v0": Case(6, faults=NO_PROMISE),
    # A letter said blindly is right as often as there are options.
    "MultipleChoice-v0": Case(faults={"verifier: constant reply": "warning"}),
    "InstructionFollowing-v0": Case(not_asked=NO_REFERENCE),
    # Nobody is paid who does not work.
    "Format-v0": Case(faults={"rewards: depends on the play": "warning"}, not_asked=NO_REFERENCE),
}
# An audit asks for thousands of verdicts. Each of these asks an endpoint for one, or runs a program in a sandbox, which
# takes a fraction of a second; what matters of them is asked in their own tests.
SLOW = frozenset({"Judge-v0", "Code-v0", "CodeTests-v0", "PythonRepl-v0", "Shell-v0"})

# Games like others that are audited.
SELDOM = frozenset(
    {
        *("Bandit-v0", "Countdown-v0", "GuessNumber-v0", "Mastermind-v0", "Maze-v0"),
        *("Game2048-v0", "Minesweeper-v0", "TowerOfHanoi-v0"),
    }
)
BUILT_IN = [
    pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else ())
    for name in sorted(ENVIRONMENTS.keys() - SLOW)
]

TEXTS = ("Blackjack-v1", "FrozenLake-v1", "CartPole-v1")


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    texts = [part for name in TEXTS for part in ("--gymnasium-text", f"{name}-text={name}")]
    with Auditor("--gymnasium", "CartPole-v1", *texts) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("env_id", BUILT_IN)
def test_a_built_in_environment(auditor: Auditor, env_id: str) -> None:
    case = CASES.get(env_id, Case())
    if ENVIRONMENTS[env_id].load().metadata.get("needs") == "a sandbox":
        working_sandbox()
    # What is measured needs enough episodes, also where the machine has little time for them.
    card = auditor.audit(env_id, case.kwargs, episodes=case.episodes, budget_s=400)
    stateless = card.about["kind"] == "stateless"
    has_reference = stateless and "reference answer" not in case.not_asked
    assert faults(card) == case.faults
    if has_reference:
        items = case.episodes
        assert entry_of(card, "reference answer")["numbers"] == {
            "paid": items,
            "items": items,
            "field": "answer",
        }
    elif not stateless and "expert" not in case.not_asked and "difficulty: expert" not in case.faults:
        assert entry_of(card, "expert")["numbers"]["rate"] == 1.0
    page = " ".join((ROOT / "docs" / "audit.md").read_text().split())
    checks = {entry.check.removesuffix(", random").removesuffix(", expert") for entry in card.entries}
    undocumented = {check for check in checks if f"`{check}`" not in page}
    assert undocumented == set()
    assert entry_of(card, "memory")["numbers"]["bytes_per_episode"] < 8 * 1024
    assert entry_of(card, "in another process")["numbers"] == {"compared": 8, "different": 0, "fields": []}
    # A time that a slowed machine leaves unknown is neither good nor bad; too slow on any machine is a fault above.
    skipped = {
        entry.check: entry.detail
        for entry in card.entries
        if entry.verdict is CardVerdict.SKIPPED and entry.numbers.get("machine_slowdown", 1.0) <= 1.0
    }
    assert skipped.keys() <= (NO_EXPERT if stateless else frozenset()) | case.not_asked, skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"is_slippery": True, "profile": "ragen"},
        {"size": 6, "profile": "verl-agent", "max_episode_steps": 20},
        {"profile": "gem", "max_actions_per_turn": 3},
    ],
    ids=lambda kwargs: kwargs["profile"],
)
def test_frozen_lake_as_other_frameworks_show_it(auditor: Auditor, kwargs: dict[str, Any]) -> None:
    card = auditor.audit("FrozenLake-v0", kwargs)
    assert faults(card) == {}
    # An unreadable reply costs 0.1: who is paid more than a few of those was understood.
    assert entry_of(card, "random")["numbers"]["mean_return"] > -0.3


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TEXTS)
def test_an_environment_of_gymnasium_as_text(auditor: Auditor, env_id: str) -> None:
    assert faults(auditor.audit(f"{env_id}-text")) == {}


def test_an_environment_of_gymnasium_as_it_is(auditor: Auditor) -> None:
    assert faults(auditor.audit("CartPole-v1")) == NO_SUCCESS
