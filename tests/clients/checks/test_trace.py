"""`roll-env check` plays two environments of a class in turns, and in another process."""

from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from rollgym.clients.checks.local import check_seeds
from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget


class SharedSpaces(gymnasium.Env[int, int]):
    """Its spaces belong to the class, and what it shows is all that was done."""

    metadata: ClassVar[dict[str, Any]] = {"deterministic": True}
    action_space = spaces.Discrete(2**20)
    observation_space = spaces.Discrete(2**40)

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self._seen = 0
        self._steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self._seen = (self._seen * 31 + int(action)) % 2**40
        self._steps += 1
        return self._seen, 0.0, self._steps == 20, False, {}


class SharedState(SharedSpaces):
    """Environments of it count in common, which a seed does not fix."""

    counts: ClassVar[list[int]] = []

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.counts.append(action)
        observation, *rest = super().step(action)
        return (observation + len(self.counts) % 2, *rest)


def seed_findings(env_class: type[gymnasium.Env]) -> list[Finding]:
    return list(check_seeds(CheckTarget(f"{env_class.__module__}:{env_class.__name__}")))


def test_spaces_of_a_class_are_no_shared_state() -> None:
    assert [each for each in seed_findings(SharedSpaces) if each.status is not Status.PASS] == []


def test_shared_state_is_found() -> None:
    (found,) = seed_findings(SharedState)
    assert found.status is Status.FAIL
    assert "two instances were asked the same" in found.detail
