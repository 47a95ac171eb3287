"""An algorithm's state between steps: an adaptive coefficient, running moments, the values of tasks.

States are values: functions return new ones, and a checkpoint keeps them as plain data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from rollgym.trainer.algorithms.loss_settings import KLSettings

if TYPE_CHECKING:
    from rollgym.trainer.algorithms.advantage_settings import MovingBaselineAdvantage, SpoAdvantage

LARGEST_CHANGE = 0.2
"""By which part of itself an adaptive coefficient moves at most, once `horizon` episodes are played."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and summed squared deviations of returns so far (Welford's)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def taking(self, values: Sequence[float]) -> "RunningMoments":
        """Return the moments with these values taken in (Chan, Golub and LeVeque 1983)."""
        if not values:
            return self
        count = len(values)
        mean = math.fsum(values) / count
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, apart = self.count + count, mean - self.mean
        return RunningMoments(
            total,
            self.mean + apart * count / total,
            self.squares + squares + apart**2 * self.count * count / total,
        )

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 0 of fewer than two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(frozen=True, slots=True)
class SuccessEstimate:
    """What is known of one task's or domain's success.

    Attributes:
        successes: Pseudo-count of successes.
        failures: Pseudo-count of failures.
        moved: How far the policy had moved in all when it was last played.
    """

    successes: float
    failures: float
    moved: float

    @property
    def value(self) -> float:
        """The expected return: the successes' share of the pseudo-counts."""
        return self.successes / (self.successes + self.failures)


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """All that is remembered.

    Attributes:
        kl_coefficient: The adaptive weight of the KL penalty; None while it is the settings'.
        returns: Moments of the returns of all episodes so far.
        moved: Sum over updates of the KL per token from the policy before the update to the one after it.
        worths: What tasks or domains were worth, by their keys, those asked for last at the end.
        baselines: Moving averages of returns, likewise.
    """

    kl_coefficient: float | None = None
    returns: RunningMoments = RunningMoments()
    moved: float = 0.0
    worths: Mapping[str, SuccessEstimate] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain data; an empty dict if it is the initial state."""
        if self == AlgorithmState():
            return {}
        return {
            "kl_coefficient": self.kl_coefficient,
            "returns": [self.returns.count, self.returns.mean, self.returns.squares],
            "moved": self.moved,
            "worths": {key: [w.successes, w.failures, w.moved] for key, w in self.worths.items()},
            "baselines": dict(self.baselines),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the state that `as_dict` described.

        Raises:
            ValueError: If the data do not describe a state.
        """
        if not data:
            return cls()
        try:
            return cls(
                kl_coefficient=data["kl_coefficient"],
                returns=RunningMoments(*data["returns"]),
                moved=float(data["moved"]),
                worths={str(key): SuccessEstimate(*parts) for key, parts in data["worths"].items()},
                baselines={str(key): float(value) for key, value in data.get("baselines", {}).items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("the algorithm's state is of another shape") from error


class Memory:
    """Holds the state between the steps of a run.

    Attributes:
        state: What is remembered now.
    """

    def __init__(self, state: AlgorithmState | None = None) -> None:
        self.state = state or AlgorithmState()


def adapted_coefficient(coefficient: float, measured: float, episodes: int, settings: KLSettings) -> float:
    """Return the KL penalty's weight for the next step (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    `coefficient (1 + clip(measured / target - 1, -0.2, 0.2) episodes / horizon)`. A measured divergence that is not
    finite changes nothing.

    Args:
        coefficient: Its weight in this step.
        measured: KL per token from the reference, as the penalty estimates it.
        episodes: Episodes of this step.
        settings: The penalty; without a target the weight stays.
    """
    if settings.target is None or not math.isfinite(measured):
        return coefficient
    error = min(max(measured / settings.target - 1, -LARGEST_CHANGE), LARGEST_CHANGE)
    return coefficient * max(1 + error * episodes / settings.horizon, 0.0)


def worth_of(settings: "SpoAdvantage", state: AlgorithmState, key: str) -> SuccessEstimate:
    """Return what a task or domain is known to be worth: the prior, if it was never played."""
    if (known := state.worths.get(key)) is not None:
        return known
    weight = 1 / (1 - settings.rho_low)  # as much as a tracker that forgets the fastest holds
    return SuccessEstimate(weight * settings.prior, weight * (1 - settings.prior), state.moved)


def kept_share(settings: "SpoAdvantage", distance: float) -> float:
    """Return what is kept of a tracker when the policy has moved so far since: `2^(-D / D_half)`, within bounds."""
    share: float = 2.0 ** (-distance / settings.half_kl)
    return min(max(share, settings.rho_low), settings.rho_high)


def with_averages(
    settings: "MovingBaselineAdvantage", state: AlgorithmState, keys: Sequence[str], returns: Sequence[float]
) -> AlgorithmState:
    """Return the state with the returns of these episodes taken into their moving averages."""
    _, baselines = moving_baseline_advantages(returns, keys, state.baselines, settings.decay)
    while len(baselines) > settings.tracked:
        del baselines[next(iter(baselines))]
    return replace(state, baselines=baselines)


def with_outcomes(
    settings: "SpoAdvantage", state: AlgorithmState, keys: Sequence[str], returns: Sequence[float]
) -> AlgorithmState:
    """Return the state after these episodes (SPO, arXiv:2509.13232, section 3.1).

    The trackers are Beta distributions: `successes = rho successes + r`, `failures = rho failures + 1 - r`, with the
    return r within [0, 1]. What was played several times in a step forgets once.

    Args:
        settings: The tracker's.
        state: Before.
        keys: Task or domain of each episode.
        returns: Return of each.
    """
    worths = dict(state.worths)
    for key in dict.fromkeys(keys):
        known = worth_of(settings, state, key)
        kept = kept_share(settings, state.moved - known.moved)
        earned = [min(max(value, 0.0), 1.0) for name, value in zip(keys, returns, strict=True) if name == key]
        worths.pop(key, None)
        worths[key] = SuccessEstimate(
            kept * known.successes + sum(earned),
            kept * known.failures + len(earned) - sum(earned),
            state.moved,
        )
    while len(worths) > settings.tracked:
        del worths[next(iter(worths))]
    return replace(state, worths=worths)


def moving_baseline_advantages(
    returns: Sequence[float], keys: Sequence[str], baselines: Mapping[str, float], decay: float = 0.95
) -> tuple[list[float], dict[str, float]]:
    """Return each episode's return less its key's average, and the averages after all of them.

    Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119, section 3.3): an episode is compared with the
    average before it takes part in it; averages begin at 0.

    Args:
        returns: Return of each episode, in the order in which averages take them in.
        keys: What each is averaged with: its domain, role, or task.
        baselines: The averages before.
        decay: What an average keeps at each episode.
    """
    averages = dict(baselines)
    advantages = []
    for value, key in zip(returns, keys, strict=True):
        before = averages.pop(key, 0.0)
        advantages.append(value - before)
        averages[key] = decay * before + (1 - decay) * value
    return advantages, averages
