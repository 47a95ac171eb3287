"""The record of an episode, turn by turn: the texts, their results, and the tokens as they were sampled.

As plain data (`rollgym.trainer.records.schema`) a trajectory is complete: it can be read back.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollgym.trainer.records.schema import (
    EPISODE_FORMAT,
    EpisodeFormatError,
    TaskSchema,
    TurnSchema,
    member_of,
    read_schema,
)
from rollgym.trainer.records.segment import PrefixBreak, Segment
from rollgym.trainer.records.timeline import Timeline
from rollgym.trainer.tasks.task import RewardMixture, RewardPart, Task


class Outcome(StrEnum):
    """How an episode ended. Only the first three are results of the policy."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ENVIRONMENT_ERROR = "environment_error"
    INVALID_NUMBER = "invalid_number"
    CONTEXT_OVERFLOW = "context_overflow"
    AGENT_ERROR = "agent_error"
    UNPLAYABLE = "unplayable"

    @property
    def is_result(self) -> bool:
        """Whether the policy earned this outcome; the others are replaced and counted apart, never reward 0."""
        return self in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED, Outcome.CONTEXT_OVERFLOW)


@dataclass(slots=True)
class Turn:
    """One reply of the policy and the environment's response to it.

    Attributes:
        segment: Index of the segment that holds the reply.
        start: First token of the reply in that segment.
        end: One past the last token of the reply in that segment.
        observation: The observation that the policy was shown, as text.
        reply: The reply as text; for people, never the record.
        reward: Reward of the step, format penalty included.
        anchor: Key of the state in which the reply was given, for step-level grouping; None if unknown.
        action_is_valid: Whether the environment could read the reply.
        format_penalty: The part of the reward that punishes an unreadable reply (zero or negative).
        finish_reason: Why the reply ended: "stop" or "length".
        advantages: Advantage of each token of the reply; empty if it was not trained on.
        reward_parts: The parts of the reward by name, if its source reports them.
        is_summary: Whether it sums up the history for the policy itself: the environment did not see it.
        structured: Whether an agent had constrained its form: log-probabilities of its tokens are those of the
            constrained distribution.
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
    reward_parts: dict[str, float] = field(default_factory=dict)
    is_summary: bool = False
    structured: bool = False

    def as_record(self) -> dict[str, Any]:
        """Return the turn as plain data."""
        return {
            "observation": self.observation,
            "reply": self.reply,
            "reward": self.reward,
            "valid": self.action_is_valid,
            "format_penalty": self.format_penalty,
            "anchor": self.anchor,
            "finish_reason": self.finish_reason,
            "tokens": [self.segment, self.start, self.end],
            "advantages": self.advantages[:1] if len(set(self.advantages)) == 1 else self.advantages,
        } | self._rare()

    def _rare(self) -> dict[str, Any]:
        """Return what most turns have nothing of."""
        rare: dict[str, Any] = {"reward_parts": self.reward_parts} if self.reward_parts else {}
        marks = {"is_summary": self.is_summary, "structured": self.structured}
        return rare | {name: True for name, marked in marks.items() if marked}

    @classmethod
    def from_schema(cls, data: TurnSchema, name: str, lengths: Sequence[int]) -> "Turn":
        """Return the turn that data describe; see `Segment.from_schema`.

        Raises:
            EpisodeFormatError: If it is outside its segment.
        """
        segment, start, end = data.tokens
        if start != end and not (0 <= segment < len(lengths) and 0 <= start < end <= lengths[segment]):
            raise EpisodeFormatError(f"{name}.tokens: it does not lie within a segment")
        return cls(
            segment=segment,
            start=start,
            end=end,
            observation=data.observation,
            reply=data.reply,
            reward=data.reward,
            anchor=data.anchor,
            action_is_valid=data.valid,
            format_penalty=data.format_penalty,
            finish_reason=data.finish_reason,
            advantages=_for_each(data.advantages, end - start, name),
            reward_parts=dict(data.reward_parts),
            is_summary=data.is_summary,
            structured=data.structured,
        )


@dataclass(slots=True)
class Trajectory:
    """One episode of one task.

    Attributes:
        task: The task that was played.
        member: Index of the episode in its group.
        attempt: 0, or how often earlier attempts at this episode failed for reasons of the environment.
        segments: The tokens; one segment if every prompt continued the one before it.
        turns: The turns, in order, summaries among them.
        outcome: The way in which the episode ended.
        detail: A word on the outcome, for people.
        metrics: Numbers of the episode that the environment reported at its end.
        timeline: The episode's waits, with their times.
        next_prompt: The policy's next prompt, as token ids, if the episode was cut off and the algorithm
            asks for the value of that; else empty.
    """

    task: Task
    member: int
    attempt: int = 0
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome = Outcome.TRUNCATED
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)
    next_prompt: list[int] = field(default_factory=list)

    @property
    def total_reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def steps(self) -> list[Turn]:
        """The turns that the environment answered: all but summaries."""
        return [turn for turn in self.turns if not turn.is_summary]

    @property
    def summaries(self) -> int:
        """How often the policy summed up its history."""
        return sum(turn.is_summary for turn in self.turns)

    @property
    def success(self) -> bool:
        """Whether the environment said `info["success"]` at the end."""
        return self.outcome is Outcome.SOLVED

    @property
    def prefix_breaks(self) -> int:
        """How often a prompt did not continue the stored ids, and so opened a segment."""
        return max(0, sum(bool(segment.ids) for segment in self.segments) - 1)

    @property
    def forks(self) -> int:
        """The former name of `prefix_breaks`, which is understood in this release."""
        warnings.warn("Trajectory.forks is called prefix_breaks now", DeprecationWarning, stacklevel=2)
        return self.prefix_breaks

    @property
    def prefix_break_kinds(self) -> Counter[PrefixBreak]:
        """How often segments were opened, by kind."""
        return Counter(segment.prefix_break for segment in self.segments if segment.prefix_break is not None)

    @property
    def fork_kinds(self) -> Counter[PrefixBreak]:
        """The former name of `prefix_break_kinds`, which is understood in this release."""
        warnings.warn(
            "Trajectory.fork_kinds is called prefix_break_kinds now", DeprecationWarning, stacklevel=2
        )
        return self.prefix_break_kinds

    @property
    def action_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this episode; -1 if none was sampled."""
        return min((v for segment in self.segments for v in segment.versions if v >= 0), default=-1)

    def as_record(self) -> dict[str, Any]:
        """Return the episode as plain data, all that it holds; `from_record` gives it back."""
        rare: dict[str, Any] = {"next_prompt": self.next_prompt} if self.next_prompt else {}
        return {
            "format": EPISODE_FORMAT,
            "task": self.task.as_dict(),
            "member": self.member,
            "attempt": self.attempt,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "reward": self.total_reward,
            "forks": self.prefix_breaks,  # files have another word
            "metrics": self.metrics,
            "seconds": {name: round(spent, 6) for name, spent in self.timeline.seconds().items()},
            "turns": [turn.as_record() for turn in self.turns],
            "segments": [segment.as_record() for segment in self.segments],
            **rare,
        }

    @classmethod
    def from_record(cls, record: object) -> "Trajectory":
        """Read an episode that `as_record` wrote. Unknown keys are ignored.

        Raises:
            EpisodeFormatError: If it is not an episode: the message names the place. Its cost is that of reading it.
        """
        data = read_schema(record)
        lengths = [len(each.ids) for each in data.segments]
        return cls(
            task=_task(data.task),
            member=data.member,
            attempt=data.attempt,
            segments=[
                Segment.from_schema(each, f"segments.{index}", lengths)
                for index, each in enumerate(data.segments)
            ],
            turns=[
                Turn.from_schema(each, f"turns.{index}", lengths) for index, each in enumerate(data.turns)
            ],
            outcome=member_of(Outcome, data.outcome, "outcome"),
            detail=data.detail,
            metrics=dict(data.metrics),
            timeline=Timeline.from_seconds(data.seconds),
            next_prompt=data.next_prompt,
        )


def _for_each(advantages: Sequence[float], tokens: int, name: str) -> list[float]:
    """Return the advantages of a reply's tokens: none, one that all share, or one for each."""
    if len(advantages) not in (0, 1, tokens):
        raise EpisodeFormatError(
            f"{name}: {len(advantages)} advantages for {tokens} tokens do not fit together"
        )
    return list(advantages) * tokens if len(advantages) == 1 else list(advantages)


def _task(data: TaskSchema) -> Task:
    mixture = data.mixture
    parts = () if mixture is None else tuple(RewardPart(**dict(part)) for part in mixture.parts)
    read = None if mixture is None else RewardMixture(mixture.own, parts)
    return Task(**dict(data) | {"mixture": read})
