"""Whether a run learns anything: reports signs that it does not, and ends the run if they last."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.scheduler import NothingToLearnError

COLLAPSED_ENTROPY = 0.01
"""Nats of a token's entropy below which replies are as good as fixed."""

_ZERO = 1e-9
"""Advantages no larger than this are what rounding leaves of equal rewards."""

_FIRST_STEPS = 4
"""Steps at the beginning of a run that later ones are compared with."""

_EARLY_STEPS = 10
_FALLEN = 0.05
"""Part of its first value that entropy may fall to in so many steps; a policy that learns solves more by then."""


@dataclass(frozen=True, slots=True)
class NoLearningReason:
    """Why nothing could be learnt in a step.

    Attributes:
        reason: Why nothing could be learnt.
        remedy: What the user can do about it.
        solved: Whether it is because there is nothing left to learn: all episodes were solved.
    """

    reason: str
    remedy: str
    solved: bool = False


FILTERED = NoLearningReason(
    "the filter kept none of the groups",
    "take other tasks, raise rollout.group_size, or have algorithm.filter keep more",
)
UNCHOSEN = NoLearningReason(
    "no episode with sampled tokens was chosen", "have algorithm.episodes choose more, or leave it out"
)
SKIPPED = NoLearningReason(
    "every optimizer step was left out, since something was not finite",
    "look at the rewards, or lower optimizer.learning_rate",
)
COLLAPSED = NoLearningReason(
    "entropy is gone and all episodes of a group have the same replies",
    "where it does worse than before, begin again from an earlier checkpoint with a lower optimizer.learning_rate",
)
TOO_FAST = NoLearningReason(
    "entropy was lost in the first steps, before more episodes were solved, and episodes are paid alike",
    "begin again with a third of optimizer.learning_rate",
)
NO_ADVANTAGE = NoLearningReason(
    "every advantage is 0, since episodes that are compared were paid alike",
    "take tasks that this policy solves now and then, and see whether its replies can be read "
    "(rollout/valid_replies)",
)
PAID_ALIKE = NoLearningReason(
    "all episodes were paid alike",
    "take tasks that this policy solves now and then, and see whether its replies can be read "
    "(rollout/valid_replies)",
)
NO_GRADIENT = NoLearningReason(
    "the gradient of the loss is 0, whatever the rewards are",
    "look at algorithm.surrogate, algorithm.selection and algorithm.correction, which may leave every token out",
)
SOLVED = NoLearningReason("all episodes were solved", "harder tasks would teach more", solved=True)


def episode_health(groups: Sequence[Group]) -> dict[str, float]:
    """Return how far the episodes of a step differ from each other.

    Args:
        groups: The groups of the step, those that a filter left out among them.
    """
    compared = [group.trajectories for group in groups if len(group.trajectories) > 1]
    rewards = {_rewards(trajectory) for group in groups for trajectory in group.trajectories}
    metrics = {"health/distinct_rewards": float(len(rewards))}
    if compared:
        metrics["health/equal_groups"] = _share_alike(compared, _rewards)
        metrics["health/alike_groups"] = _share_alike(compared, _replies)
    return metrics


def _share_alike(
    groups: Sequence[Sequence[Trajectory]], look: Callable[[Trajectory], tuple[Any, ...]]
) -> float:
    return sum(len({look(each) for each in group}) == 1 for group in groups) / len(groups)


def _rewards(trajectory: Trajectory) -> tuple[tuple[int, float], ...]:
    """An episode's rewards and their turns; turns without a reward do not count."""
    return tuple((index, turn.reward) for index, turn in enumerate(trajectory.turns) if turn.reward)


def _replies(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(trajectory.segments[turn.segment].ids[turn.start : turn.end])
        for turn in trajectory.turns
        if turn.end > turn.start
    )


@dataclass(frozen=True, slots=True)
class Learning:
    """The sources of a run's learning signal, which decide whether there is anything to learn.

    Attributes:
        rewards: Whether from rewards; a teacher says something of every reply, however it is paid.
        paid_alike: Whether nothing can be learnt if all episodes have equal rewards. A user's advantage may
            read anything.
        advantages: Whether from advantages alone. A user's surrogate may read anything.
    """

    rewards: bool = True
    paid_alike: bool = True
    advantages: bool = True


def sign_of(metrics: Mapping[str, Any], learning: Learning) -> NoLearningReason | None:
    """Return why nothing could be learnt in a step; None if something could.

    Args:
        metrics: The step's.
        learning: The sources of the run's learning signal.
    """
    found = _sign(metrics, learning)
    solved = _number(metrics, "rollout/success") == 1.0 and found is not SKIPPED
    return SOLVED if found is not None and solved else found


def _sign(metrics: Mapping[str, Any], learning: Learning) -> NoLearningReason | None:
    if not _number(metrics, "policy/optimizer_steps"):
        if _number(metrics, "rollout/groups_kept") == 0.0:
            return FILTERED
        return SKIPPED if _number(metrics, "policy/skipped_steps") else UNCHOSEN
    found = _sign_of_rewards(metrics, learning) if learning.rewards else None
    if found is None and _number(metrics, "policy/gradient_norm") == 0.0:
        return NO_GRADIENT
    return found


def _sign_of_rewards(metrics: Mapping[str, Any], learning: Learning) -> NoLearningReason | None:
    entropy, alike = _number(metrics, "policy/entropy"), _number(metrics, "health/alike_groups")
    if entropy is not None and entropy < COLLAPSED_ENTROPY and alike == 1.0:
        return COLLAPSED
    advantage = _number(metrics, "batch/advantage_max")
    still = learning.advantages or _number(metrics, "policy/gradient_norm") == 0.0
    if advantage is not None and advantage <= _ZERO and still:
        return NO_ADVANTAGE
    if learning.paid_alike and learning.advantages and _number(metrics, "health/distinct_rewards") == 1.0:
        return PAID_ALIKE
    return None


class RunHealth:
    """Follows a run step by step.

    Args:
        learning: The sources of the run's learning signal.
        limit: The run ends after this many steps in a row with nothing to learn from; None never ends it.
        say: Receives messages for people, at the first such step and then ever more rarely.
    """

    def __init__(self, learning: Learning, limit: int | None, say: Callable[[str], None]) -> None:
        self._learning = learning
        self._limit = limit
        self._say = say
        self._told: Counter[str] = Counter()
        self._first: list[tuple[float, float]] = []
        self._row: list[tuple[float, float]] = []
        self._sign: NoLearningReason | None = None
        self._entropy: float | None = None
        self._fell = False
        self._steps = self._updated = self._solved = 0

    def take_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the steps of earlier processes.

        Args:
            rows: The lines of the run's metrics.
        """
        for row in rows:
            if "rollout/reward" in row:
                self._follow(row)

    def note(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a step, and report what is wrong with it, if anything.

        Args:
            step: The step.
            metrics: Its numbers.

        Returns:
            `health/steps_without_learning`: how many steps in a row, this one the last, had nothing to learn from.
        """
        fell_before = self._fell
        sign = self._follow(metrics)
        if self._fell and not fell_before:
            self._say(
                f"health: entropy fell from {self._entropy:.3g} to {metrics['policy/entropy']:.3g} by step {step + 1}, "
                f"and no more episodes are solved than at first: optimizer.learning_rate may be too high "
                f"({TOO_FAST.remedy})"
            )
        if sign is not None:
            total, in_a_row = self._told[sign.reason], len(self._row)
            # The first ones, and ever more rarely after them: many runs have such a step now and then.
            if _doubles(total) or (in_a_row >= _FIRST_STEPS and _doubles(in_a_row)):
                self._say(
                    f"health: {_steps(step + 1, in_a_row)} had nothing to learn from: {sign.reason} ({sign.remedy})"
                )
        return {"health/steps_without_learning": float(len(self._row))}

    def check(self) -> None:
        """End a run that has learnt nothing for too long, and has not improved since its beginning.

        Raises:
            NothingToLearnError: If the run is such a run.
        """
        if self._limit is None or len(self._row) < self._limit or self._improved():
            return
        assert self._sign is not None
        raise NothingToLearnError(
            f"{len(self._row)} steps in a row had nothing to learn from, and the policy is no better than at first "
            f"(rollout.max_steps_without_learning {self._limit}): {self._sign.reason}; {self._sign.remedy}"
        )

    def check_whole(self) -> None:
        """Look at a run that has come to its last step.

        Raises:
            NothingToLearnError: If it has trained nothing at all, and has not solved all that it played.
        """
        if self._steps and not self._updated and self._solved < self._steps:
            sign = self._sign or SKIPPED
            raise NothingToLearnError(
                f"no optimizer step was taken in all {self._steps} steps of this run, so the policy is what it was: "
                f"{sign.reason}; {sign.remedy}"
            )

    def _follow(self, metrics: Mapping[str, Any]) -> NoLearningReason | None:
        sign = sign_of(metrics, self._learning)
        self._watch_entropy(metrics)
        if self._fell and sign in (COLLAPSED, NO_ADVANTAGE, PAID_ALIKE):
            sign = TOO_FAST
        played = tuple(_number(metrics, f"rollout/{name}") or 0.0 for name in ("success", "reward"))
        self._steps += 1
        self._updated += bool(_number(metrics, "policy/optimizer_steps"))
        self._solved += sign is SOLVED
        if len(self._first) < _FIRST_STEPS:
            self._first.append((played[0], played[1]))
        if sign is None or sign.solved:
            self._row = []
        else:
            self._row.append((played[0], played[1]))
            self._sign = sign
        if sign is not None:
            self._told[sign.reason] += 1
        return sign

    def _watch_entropy(self, metrics: Mapping[str, Any]) -> None:
        """Note whether entropy falls in the first steps to almost nothing, while no more episodes are solved."""
        entropy = _number(metrics, "policy/entropy")
        if entropy is None or not self._learning.rewards or self._steps >= _EARLY_STEPS:
            return
        self._entropy = self._entropy or entropy
        solved = _number(metrics, "rollout/success") or 0.0
        at_first = self._first[0][0] if self._first else solved
        self._fell = self._fell or (entropy < _FALLEN * self._entropy and solved <= at_first < 1.0)

    def _improved(self) -> bool:
        """Whether episodes are better than at first: solved more often, or, if none is ever solved, rewarded more.

        Where entropy was lost at once, more reward is what unreadable replies cost: there, that is not better.
        """
        first, now = _means(self._first), _means(self._row)
        place = 0 if first[0] or now[0] or self._fell else 1
        return now[place] > first[place]


def _steps(last: int, in_a_row: int) -> str:
    """Name steps in a row, without the colon behind a number that a step's own line has."""
    return f"steps {last + 1 - in_a_row} to {last}" if in_a_row > 1 else f"step {last}"


def _means(played: Sequence[tuple[float, float]]) -> tuple[float, float]:
    success, reward = zip(*played, strict=True)
    return math.fsum(success) / len(played), math.fsum(reward) / len(played)


def _doubles(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a line of metrics; None if it is missing or was not finite."""
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
