"""Episodes of one task, and what the algorithm's filter made of them."""

from dataclasses import dataclass, field
from typing import Any

from trainer.records.trajectory import Trajectory
from trainer.tasks.task import Task

KEPT = "kept"
"""What a filter says of a group that is trained on."""


@dataclass(slots=True)
class Group:
    """Episodes of equal task and seed: what group-relative advantages compare.

    Attributes:
        index: Place in the run's task stream.
        task: What all members played.
        admitted_version: Policy version when the group was admitted.
        trajectories: The members that ended with a result.
        failures: How many attempts failed for reasons of the environment, by outcome.
        detail: A word on the last of them, for people.
        decision: What the algorithm's filter made of it: "kept", or "filter:" and why it was dropped; empty before.
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

    def as_record(self, place: int) -> dict[str, Any]:
        """Return what is known of the group beside its episodes, as plain data.

        Args:
            place: Which of its step's groups it was, in the order in which the step took them up.
        """
        return {
            "index": self.index,
            "place": place,
            "admitted_version": self.admitted_version,
            "decision": self.decision,
            "failures": self.failures,
        }
