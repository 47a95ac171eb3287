"""Episodes as the audit keeps them: comparable and countable facts, without observations and infos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollgym.clients.measuring.statistics import Interval, success_rate
from rollgym.clients.protocol.errors import ProblemError


class Mark(NamedTuple):
    """The record of a reset or a step.

    Attributes:
        observation: Digest of the observation.
        reward: The reward; 0 of a reset.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
        success: `info["success"]` if it is a bool.
        valid: `info["action_is_valid"]` if it is a bool.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    valid: bool | None


@dataclass
class Episode:
    """One episode that was played.

    Attributes:
        policy: The policy that played.
        seed: The seed of the episode.
        marks: The marks of the reset and of each step.
        actions: The actions taken.
        problem: The server's problem if the episode broke off.
    """

    policy: str
    seed: int
    marks: list[Mark] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    problem: ProblemError | None = None

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return max(0, len(self.marks) - 1)

    @property
    def ended(self) -> bool:
        """Whether it came to its end."""
        return bool(self.marks) and (self.marks[-1].terminated or self.marks[-1].truncated)

    @property
    def solved(self) -> bool:
        """Whether its last info said `success`."""
        return bool(self.marks) and self.marks[-1].success is True

    @property
    def total_reward(self) -> float:
        """The sum of its rewards."""
        return sum(mark.reward for mark in self.marks)


class Tally(NamedTuple):
    """How often a policy solved, and its returns.

    Attributes:
        solved: Episodes solved.
        episodes: Episodes played.
        mean_return: Mean of the total rewards.
        says: Whether the environment says `success` at all.
    """

    solved: int
    episodes: int
    mean_return: float
    says: bool

    @property
    def rate(self) -> Interval:
        """The success rate with its Wilson interval."""
        return success_rate(self.solved, self.episodes)

    def __str__(self) -> str:
        rate = self.rate
        if not self.says:
            return f"return {self.mean_return:.3g} in {self.episodes} episodes"
        return (
            f"{self.solved}/{self.episodes} solved, {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}], "
            f"return {self.mean_return:.3g}"
        )

    def numbers(self) -> dict[str, float]:
        """Return the numbers for programs."""
        rate = self.rate
        return {
            "solved": self.solved,
            "episodes": self.episodes,
            "rate": rate.value,
            "rate_low": rate.low,
            "rate_high": rate.high,
            "mean_return": self.mean_return,
        }


def tally(episodes: Sequence[Episode]) -> Tally | None:
    """Count the episodes that did not break off; None if none is left."""
    played = [episode for episode in episodes if episode.problem is None and episode.actions]
    if not played:
        return None
    total = sum(episode.total_reward for episode in played)
    says = any(mark.success is not None for episode in played for mark in episode.marks)
    return Tally(sum(episode.solved for episode in played), len(played), total / len(played), says)
