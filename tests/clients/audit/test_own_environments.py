"""Our own environments have a clean card; what is said of one all the same is written down here, with its reason."""

from collections.abc import Iterator
from typing import Any

import pytest

from clients.audit.card import Verdict
from envs.registry import builtin_environments
from tests.support.audits import Auditor, entry_of, faults
from tests.support.client_server import ROOT

# The state holds the whole task, the answer included: for viewers and tests, apart from what a policy sees.
TASK_IN_STATE = {'leaks: answer in info["state"]': "warning"}
# Gymnasium's own environments say no success.
NO_SUCCESS = {"conduct: success": "warning"}

# Each of their programs is run in a sandbox: a fraction of a second, where an audit has thousands of replies scored.
# What matters of it is asked in tests/envs/code.
IN_SANDBOXES = frozenset({"Code-v0", "CodeTests-v0", "PythonRepl-v0", "Shell-v0"})

TEXTS = ("Blackjack-v1", "FrozenLake-v1", "CartPole-v1")


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    texts = [part for name in TEXTS for part in ("--gymnasium-text", f"{name}-text={name}")]
    with Auditor("--gymnasium", "CartPole-v1", *texts) as running:
        yield running


@pytest.mark.parametrize("env_id", sorted(builtin_environments().keys() - IN_SANDBOXES))
def test_a_built_in_environment(auditor: Auditor, env_id: str) -> None:
    card = auditor.audit(env_id, episodes=40)
    stateless = card.about["kind"] == "stateless"
    assert faults(card) == (TASK_IN_STATE if stateless else {})
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
