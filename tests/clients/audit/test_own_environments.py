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
# Gymnasium's own environments say no success.
NO_SUCCESS = {"conduct: success": "warning"}

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


@pytest.mark.parametrize("env_id", builtin_environments())
def test_a_built_in_environment(auditor: Auditor, env_id: str) -> None:
    if env_id in PROGRAMS:
        require_sandbox()
    # What is measured needs enough episodes, also where the machine has little time for them.
    card = auditor.audit(env_id, episodes=FEWER.get(env_id, 40), budget_s=180)
    stateless = card.about["kind"] == "stateless"
    assert faults(card) == (TASK_IN_STATE if stateless else PROGRAMS.get(env_id, {}))
    if stateless:
        assert entry_of(card, "reference answer")["numbers"] == {"paid": 40, "items": 40, "field": "answer"}
    else:
        assert entry_of(card, "expert")["numbers"]["rate"] == 1.0
    page = " ".join((ROOT / "docs" / "audit.md").read_text().split())
    checks = {entry.check.removesuffix(", random").removesuffix(", expert") for entry in card.entries}
    undocumented = {check for check in checks if f"`{check}`" not in page}
    assert undocumented == set()
    assert entry_of(card, "memory")["numbers"]["bytes_per_episode"] < 8 * 1024
    assert entry_of(card, "in another process")["numbers"] == {"compared": 8, "different": 0, "fields": []}
    skipped = {entry.check for entry in card.entries if entry.verdict is Verdict.SKIPPED}
    assert skipped <= ({"expert", "blind"} if stateless else set())


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
