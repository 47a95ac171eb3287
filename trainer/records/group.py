"""Groups of episodes of one task: how each is played, and which of them a training step receives."""

from dataclasses import dataclass, field
from typing import Any

from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.tasks.task import Task

KEPT = "kept"
"""A filter's decision for a group that is trained on."""


@dataclass(slots=True)
class Group:
    """Episodes of equal task and seed: what group-relative advantages compare.

    Attributes:
        index: Index in the run's task stream.
        task: The task that all members played.
        admitted_version: Policy version when the group was admitted.
        trajectories: The members that ended with a result.
        failures: Number of attempts that failed because of the environment, by outcome.
        detail: A word on the last of them, for people.
        decision: The algorithm's filter decision: "kept", or "filter:" and why it was dropped; empty before.
        greedy: The episode that was played beside them with the most likely tokens, for a baseline; it is not trained.
    """

    index: int
    task: Task
    admitted_version: int
    trajectories: list[Trajectory] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    detail: str = ""
    decision: str = ""
    greedy: Trajectory | None = None

    def as_record(self, position: int) -> dict[str, Any]:
        """Return what is known of the group beside its episodes, as plain data.

        Args:
            position: Its index among its step's groups, in the order in which the step took them.
        """
        return {
            "index": self.index,
            "place": position,  # files have another word
            "admitted_version": self.admitted_version,
            "decision": self.decision,
            "failures": self.failures,
        }


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group is played.

    Attributes:
        size: Episodes that a group hands to training.
        extra: Episodes started beyond `size`; when `size` have ended the others are cancelled.
        max_attempts: Attempts at one episode before the whole group is dropped.
        episode_timeout_s: An episode that takes longer is cancelled and played again.
        max_failed_groups: Groups of one environment that may be dropped in a row; one more ends the run.
        replace_at_once: Whether a dropped group's place is taken at once, or only when no other group plays any
            more: the composition of batches then never depends on timing.
        greedy: Whether one more episode of each group is played with the most likely tokens; its member is the number
            after all others.
        max_left_out: Groups that a filter may leave out in one step before it stops playing further ones; None is no
            limit.
    """

    size: int
    extra: int
    max_attempts: int
    episode_timeout_s: float
    max_failed_groups: int = 8
    replace_at_once: bool = True
    max_left_out: int | None = None
    greedy: bool = False

    @property
    def sampled(self) -> int:
        """Episodes that a group starts with sampled tokens."""
        return self.size + self.extra


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of one training step, each list in the order of the stream.

    Attributes:
        kept: Those to train on.
        left_out: Those that a filter has left out since the step before, with their episodes.
    """

    kept: list[Group]
    left_out: list[Group] = field(default_factory=list)

    @property
    def played(self) -> list[Group]:
        """All of them, in the order of the stream."""
        return sorted([*self.kept, *self.left_out], key=lambda group: group.index)
