"""The baselines that an environment declares: how they are read, and what `roll-env check` says of others."""

import math
from typing import Any

import gymnasium
import pytest

from rollgym.clients.checks.declared import Baseline, check_baselines, declared_baselines
from rollgym.clients.checks.report import Status
from rollgym.clients.checks.target import CheckTarget


class Declared(gymnasium.Env[int, int]):
    """Declares what a test sets."""

    metadata: dict[str, Any] = {}
    action_space = observation_space = gymnasium.spaces.Discrete(2)


def findings(declared: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Status, str]]:
    monkeypatch.setattr(Declared, "metadata", {"baselines": declared})
    return [(each.status, each.detail) for each in check_baselines(CheckTarget(f"{__name__}:Declared"))]


def test_a_number_is_the_share_that_is_solved_and_the_mean_return() -> None:
    declared = declared_baselines({"baselines": {"random": 0.25, "expert": [1, 10.5]}})
    assert declared == {"random": Baseline(0.25, 0.25), "expert": Baseline(1, 10.5)}
    assert declared_baselines({}) == {}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (0.5, "they are a float"),
        ({"luck": 0.5}, "an audit has no player 'luck'"),
        ({"random": 2}, "random has 2"),
        ({"random": [0.5]}, "random has [0.5]"),
        ({"random": "half"}, "random has 'half'"),
        ({"random": [0.5, None]}, "random has [0.5, None]"),
        ({"random": True}, "random has True"),
        ({"random": [0.5, math.nan]}, "random has [0.5, nan]"),
        ({"random": [0.5, -math.inf]}, "random has [0.5, -inf]"),
        ({"random": [0.5, 10**400]}, "random has [0.5, 1000"),
    ],
)
def test_a_check_names_what_is_no_baseline(declared: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((status, detail),) = findings(declared, monkeypatch)
    assert status is Status.FAIL
    assert detail.startswith(said)


def test_a_check_passes_what_can_be_read_and_says_nothing_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings({"random": 0, "expert": 1}, monkeypatch) == [(Status.PASS, "random, expert")]
    assert findings({}, monkeypatch) == []
