"""What an episode leaves behind: token ids and log-probabilities as they were sampled, turn by turn.

Token ids are the record. They come from the inference engine and are never made again from text. A prompt that
does not continue the stored ids opens a new segment (counted in `Trajectory.forks`), never a silent re-tokenisation.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainer.records.timeline import Timeline
from trainer.tasks.task import Task


class Outcome(StrEnum):
    """How an episode ended. Only the first three are results of the policy."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ENVIRONMENT_ERROR = "environment_error"
    INVALID_NUMBER = "invalid_number"
    CONTEXT_OVERFLOW = "context_overflow"

    @property
    def is_result(self) -> bool:
        """Whether the policy earned this outcome; the others are replaced and counted apart, never reward 0."""
        return self in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED, Outcome.CONTEXT_OVERFLOW)


@dataclass(slots=True)
class Segment:
    """A token sequence that only ever grew at its end. All lists have one entry per token.

    Attributes:
        ids: Token ids: prompt, reply, next prompt's tail, next reply, ...
        action_mask: True where the policy sampled the token.
        logprobs: Log-probability of the sampled token under the behaviour policy; 0.0 outside the mask.
        versions: Policy version that sampled the token; -1 outside the mask.
        turn_index: Turn of the episode that the sampled token belongs to; -1 outside the mask.
    """

    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)

    def append_context(self, ids: list[int]) -> None:
        """Append tokens that the policy reads but did not choose."""
        count = len(ids)
        self.ids += ids
        self.action_mask += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.turn_index += [-1] * count

    def append_action(self, ids: list[int], logprobs: list[float], versions: list[int], turn: int) -> None:
        """Append tokens that the policy sampled in `turn`.

        Raises:
            ValueError: If ids, logprobs and versions differ in length: the inference engine broke its contract.
        """
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"a reply of {len(ids)} tokens came with {len(logprobs)} log-probabilities "
                f"and {len(versions)} versions"
            )
        self.ids += ids
        self.action_mask += [True] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.turn_index += [turn] * len(ids)


@dataclass(slots=True)
class Turn:
    """One reply of the policy and what the environment made of it.

    Attributes:
        segment: Index of the segment that holds the reply.
        start: First token of the reply in that segment.
        end: One past the last token of the reply in that segment.
        observation: What the policy was shown, as text.
        reply: What the policy said, as text; for people, never the record.
        reward: Reward of the step, format penalty included.
        anchor: Key of the state in which the reply was given, for step-level grouping; None where unknown.
        action_is_valid: Whether the environment could read the reply.
        format_penalty: The part of the reward that punishes an unreadable reply (zero or negative).
        finish_reason: Why the reply ended: "stop" or "length".
        advantages: What the update made of each token of the reply; empty where it was not trained on.
    """

    segment: int
    start: int
    end: int
    observation: str
    reply: str
    reward: float = 0.0
    anchor: str | None = None
    action_is_valid: bool = True
    format_penalty: float = 0.0
    finish_reason: str = "stop"
    advantages: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Trajectory:
    """One episode of one task.

    Attributes:
        task: What was played.
        member: Which of the group's episodes this is.
        attempt: 0, or how often earlier attempts at this episode failed for reasons of the environment.
        segments: The tokens; one segment where every prompt continued the one before it.
        turns: The turns, in order.
        outcome: How the episode ended.
        detail: A word on the outcome, for people.
        forks: How often a prompt did not continue the stored ids (and so opened a segment).
        metrics: Numbers of the episode that the environment reported at its end.
        timeline: What the episode waited for, and when.
    """

    task: Task
    member: int
    attempt: int = 0
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome = Outcome.TRUNCATED
    detail: str = ""
    forks: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)

    @property
    def total_reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool:
        """Whether the environment said `info["success"]` at the end."""
        return self.outcome is Outcome.SOLVED

    @property
    def action_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this episode; -1 if none was sampled."""
        return min((v for segment in self.segments for v in segment.versions if v >= 0), default=-1)

    def as_text(self) -> dict[str, Any]:
        """Return the episode as plain data: readable text and the ids beside it."""
        return {
            "task": self.task.as_dict(),
            "member": self.member,
            "attempt": self.attempt,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "reward": self.total_reward,
            "forks": self.forks,
            "seconds": {name: round(spent, 6) for name, spent in self.timeline.seconds().items()},
            "turns": [
                {
                    "observation": turn.observation,
                    "reply": turn.reply,
                    "reward": turn.reward,
                    "valid": turn.action_is_valid,
                    "tokens": [turn.segment, turn.start, turn.end],
                    "advantages": [round(value, 6) for value in turn.advantages],
                }
                for turn in self.turns
            ],
            "segments": [
                {
                    "ids": segment.ids,
                    "action_mask": [int(flag) for flag in segment.action_mask],
                    "logprobs": [round(value, 6) for value in segment.logprobs],
                    "versions": segment.versions,
                }
                for segment in self.segments
            ],
        }


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
    """

    index: int
    task: Task
    admitted_version: int
    trajectories: list[Trajectory] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    detail: str = ""
