"""Our own environments have a clean card; what is said of one all the same is written down here, with its reason."""

from collections.abc import Iterator
from typing import Any

import pytest

from clients.audit.card import Verdict
from envs.code.boxes import operator_sandbox
from envs.registry import builtin_environments
from sandbox.base import SandboxUnavailableError
from tests.support.audits import Auditor, entry_of, faults
from tests.support.client_server import ROOT

# The state holds the whole task, the answer included: for viewers and tests, apart from what a policy sees.
TASK_IN_STATE = {'leaks: answer in info["state"]': "warning"}
# A letter said blindly is right as often as there are options.
KNOWN = {"MultipleChoice-v0": {"verifier: constant reply": "warning"}}
# Luck decides there: the expert plays as well as one can, and loses more often than not.
LUCK = {"Blackjack-v0": {"difficulty: expert": "warning"}}
# An expert would be a search that takes longer than a step may.
NO_EXPERT = {"Game2048-v0"}
# Ten games take their time: the long ones are made short, and all are played less often.
SHORTER = {
    "Game2048-v0": {"size": 3, "target": 32},
    "Minesweeper-v0": {"max_episode_steps": 30},
    "Sudoku-v0": {"max_episode_steps": 16},
}
GAMES = {name for name, spec in builtin_environments().items() if spec.entry_point.startswith("envs.games.")}
# Gymnasium's own environments say no success.
NO_SUCCESS = {"conduct: success": "warning"}

# Each of their programs is run in a sandbox: a fraction of a second, where an audit has thousands of replies scored.
# What matters of it is asked in tests/envs/code.
IN_SANDBOXES = frozenset({"Code-v0", "CodeTests-v0", "PythonRepl-v0", "Shell-v0"})
# Where no single response is the right one, none stands in the task.
NO_REFERENCE = frozenset({"InstructionFollowing-v0", "Format-v0"})
# Nobody is paid who does not work.
KNOWN = {"Format-v0": {"rewards: depends on the play": "warning"}}
# An audit asks for thousands of verdicts, and each of these for one of an endpoint.
ASKS_OTHERS = frozenset({"Judge-v0"})
# Programs could tell the time, so nothing is promised that holds for those that are played here.
PROGRAMS = {"ToolUsePython-v0": {"determinism: declares it": "warning"}}
# Conversations take many turns, and programs a process each.
FEWER = {"Retail-v0": 12, "ToolUse-v0": 12, "ToolUsePython-v0": 6}

TEXTS = ("Blackjack-v1", "FrozenLake-v1", "CartPole-v1")


def require_sandbox() -> None:
    try:
        operator_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    texts = [part for name in TEXTS for part in ("--gymnasium-text", f"{name}-text={name}")]
    with Auditor("--gymnasium", "CartPole-v1", *texts) as running:
        yield running


@pytest.mark.parametrize("env_id", sorted(builtin_environments().keys() - IN_SANDBOXES))
def test_a_built_in_environment(auditor: Auditor, env_id: str) -> None:
    if env_id in PROGRAMS:
        require_sandbox()
    card = auditor.audit(env_id, episodes=FEWER.get(env_id, 40))
    stateless = card.about["kind"] == "stateless"
    assert faults(card) == (TASK_IN_STATE if stateless else {}) | KNOWN.get(env_id, {})
    assert faults(card) == (TASK_IN_STATE if stateless else PROGRAMS.get(env_id, {}))
    card = auditor.audit(env_id, SHORTER.get(env_id), episodes=12 if env_id in GAMES else 40)
    stateless = card.about["kind"] == "stateless"
    assert faults(card) == (TASK_IN_STATE if stateless else LUCK.get(env_id, {}))
    if stateless:
@pytest.mark.parametrize("env_id", sorted(builtin_environments().keys() - ASKS_OTHERS))
def test_a_built_in_environment(auditor: Auditor, env_id: str) -> None:
    card = auditor.audit(env_id, episodes=40)
    stateless = card.about["kind"] == "stateless"
    in_state = TASK_IN_STATE if stateless and env_id not in NO_REFERENCE else {}
    assert faults(card) == in_state | KNOWN.get(env_id, {})
    if env_id in NO_REFERENCE:
        assert entry_of(card, "reference answer")["verdict"] == "skipped"
    elif stateless:
        assert entry_of(card, "reference answer")["numbers"] == {"paid": 40, "items": 40, "field": "answer"}
    elif env_id not in LUCK.keys() | NO_EXPERT:
        assert entry_of(card, "expert")["numbers"]["rate"] == 1.0
    page = " ".join((ROOT / "docs" / "audit.md").read_text().split())
    checks = {entry.check.removesuffix(", random").removesuffix(", expert") for entry in card.entries}
    undocumented = {check for check in checks if f"`{check}`" not in page}
    assert undocumented == set()
    assert entry_of(card, "memory")["numbers"]["bytes_per_episode"] < 8 * 1024
    assert entry_of(card, "in another process")["numbers"] == {"compared": 8, "different": 0, "fields": []}
    skipped = {entry.check for entry in card.entries if entry.verdict is Verdict.SKIPPED}
    unknown = {"hedged replies", "reference answer"} if env_id in NO_REFERENCE else set()
    assert skipped <= ({"expert", "blind"} | unknown if stateless else set())
    assert skipped <= ({"expert", "blind"} if stateless or env_id in NO_EXPERT else set())


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


@pytest.mark.parametrize("env_id", TEXTS)
def test_an_environment_of_gymnasium_as_text(auditor: Auditor, env_id: str) -> None:
    assert faults(auditor.audit(f"{env_id}-text")) == {}


def test_an_environment_of_gymnasium_as_it_is(auditor: Auditor) -> None:
    assert faults(auditor.audit("CartPole-v1")) == NO_SUCCESS
