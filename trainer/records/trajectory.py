"""What an episode leaves behind: token ids and log-probabilities as they were sampled, turn by turn.

Token ids are the record. They come from the inference engine and are never made again from text. A prompt that
does not continue the stored ids opens a new segment (counted in `Trajectory.forks`), never a silent re-tokenisation.
As plain data (`trainer.records.schema`) a trajectory is complete: it can be read back.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from trainer.records.experts import Experts
from trainer.records.experts import as_record as experts_as_record
from trainer.records.experts import from_record as experts_from_record
from trainer.records.images import PlacedImage, read_image
from trainer.records.schema import (
    EPISODE_FORMAT,
    EpisodeFormatError,
    SegmentSchema,
    TaskSchema,
    TurnSchema,
    read_schema,
    runs,
    spread,
)
from trainer.records.timeline import Timeline
from trainer.tasks.task import RewardMixture, RewardPart, Task

_Value = TypeVar("_Value", int, float)


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


class Fork(StrEnum):
    """Why a prompt opened a segment in place of continuing one: where it differs from its nearest relative."""

    RETRY = "retry"
    """Nowhere: the same prompt was asked again."""
    PARALLEL = "parallel"
    """Its relative was being sampled at the same time."""
    BRANCH = "branch"
    """Behind a reply: a conversation goes on in another way."""
    REWRITE = "rewrite"
    """In place of a reply, or within one: the past was edited, by the template or by the agent."""
    CONVERSATION = "conversation"
    """Before any reply: a conversation of its own, such as a sub-agent's or a shortened history's."""
    SUMMARY = "summary"
    """Behind a summary of the policy's own, which took the place of its history."""


@dataclass(slots=True)
class Segment:
    """A token sequence that only ever grew at its end. All lists have one entry per token.

    Attributes:
        ids: Token ids: prompt, reply, next prompt's tail, next reply, ...
        action_mask: True where the policy sampled the token.
        logprobs: Log-probability of the sampled token under the behaviour policy; 0.0 outside the mask.
        versions: Policy version that sampled the token; -1 outside the mask.
        turn_index: Turn of the episode that the sampled token belongs to; -1 outside the mask.
        parent: Another segment and how many ids it begins with in common with that one; None where there is none.
        fork: Why it was opened; None for an episode's first segment.
        images: Pictures that the policy was shown, and the tokens that stand for them, in order.
        experts: Experts that tokens took when replies were drawn, `[tokens, layers * taken]` of the first of them; None
            where no server told.
    """

    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    parent: tuple[int, int] | None = None
    fork: Fork | None = None
    images: list[PlacedImage] = field(default_factory=list)
    experts: Experts | None = field(default=None, compare=False, repr=False)

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

    def append_experts(self, experts: Experts) -> None:
        """Take up the experts of the tokens of which none are known yet.

        Args:
            experts: Of the segment's tokens from the first on, as the server computed them for its last reply.
        """
        known = 0 if self.experts is None else len(self.experts)
        more = experts[known : len(self.ids)]
        self.experts = more if self.experts is None else np.concatenate([self.experts, more])

    def as_record(self) -> dict[str, Any]:
        """Return the segment as plain data."""
        return {
            "ids": self.ids,
            "action_mask": [int(flag) for flag in self.action_mask],
            "logprobs": self._sampled(self.logprobs),
            "versions": runs(self._sampled(self.versions)),
            "turn_index": runs(self._sampled(self.turn_index)),
            "parent": None if self.parent is None else list(self.parent),
            "fork": self.fork,
        } | self._rare()

    def _rare(self) -> dict[str, Any]:
        """Return what most segments have nothing of."""
        rare: dict[str, Any] = {}
        if self.images:
            rare["images"] = [image.as_record() for image in self.images]
        if self.experts is not None:
            rare["experts"] = experts_as_record(self.experts)
        return rare

    @classmethod
    def from_schema(cls, data: SegmentSchema, name: str, lengths: Sequence[int]) -> "Segment":
        """Return the segment that data describe.

        Args:
            data: What `as_record` wrote.
            name: What it is called in messages.
            lengths: Tokens of each of the episode's segments.

        Raises:
            EpisodeFormatError: If its parts do not fit together.
        """
        sampled = sum(data.action_mask)
        if len(data.action_mask) != len(data.ids) or len(data.logprobs) != sampled:
            raise EpisodeFormatError(
                f"{name}: {len(data.ids)} ids, {len(data.action_mask)} marks and {len(data.logprobs)} "
                f"log-probabilities for {sampled} sampled tokens do not fit together"
            )
        parent = None if data.parent is None else (data.parent[0], data.parent[1])
        if parent is not None and not (parent[0] < len(lengths) and parent[1] <= lengths[parent[0]]):
            raise EpisodeFormatError(f"{name}: its parent is not there")
        mask = [flag == 1 for flag in data.action_mask]
        return cls(
            ids=list(data.ids),
            action_mask=mask,
            logprobs=_placed(data.logprobs, mask, 0.0),
            versions=_placed(spread(data.versions, sampled, f"{name}.versions"), mask, -1),
            turn_index=_placed(spread(data.turn_index, sampled, f"{name}.turn_index"), mask, -1),
            parent=parent,
            fork=None if data.fork is None else _member(Fork, data.fork, f"{name}.fork"),
            images=[
                read_image(each.start, each.end, each.png, len(data.ids), f"{name}.images.{place}")
                for place, each in enumerate(data.images)
            ],
            experts=_experts(data, name),
        )

    def _sampled(self, values: list[_Value]) -> list[_Value]:
        return list(compress(values, self.action_mask))


def _experts(data: SegmentSchema, name: str) -> Experts | None:
    if data.experts is None:
        return None
    try:
        return experts_from_record(data.experts, len(data.ids))
    except ValueError as error:
        raise EpisodeFormatError(f"{name}.experts {error}") from None


def _placed(values: Iterable[_Value], mask: Sequence[bool], other: _Value) -> list[_Value]:
    """Return values where the mask is true, and `other` elsewhere."""
    left = iter(values)
    return [next(left) if flag else other for flag in mask]


def _for_each(advantages: Sequence[float], tokens: int, name: str) -> list[float]:
    """Return the advantages of a reply's tokens: none, one that all share, or one for each."""
    if len(advantages) not in (0, 1, tokens):
        raise EpisodeFormatError(
            f"{name}: {len(advantages)} advantages for {tokens} tokens do not fit together"
        )
    return list(advantages) * tokens if len(advantages) == 1 else list(advantages)


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
        reward_parts: What the reward is made of, by name, where whoever gave it says so.
        is_summary: Whether it sums up the history for the policy itself: the environment did not see it.
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
        return rare | {"is_summary": True} if self.is_summary else rare

    @classmethod
    def from_schema(cls, data: TurnSchema, name: str, lengths: Sequence[int]) -> "Turn":
        """Return the turn that data describe; see `Segment.from_schema`.

        Raises:
            EpisodeFormatError: If it does not lie within its segment.
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
        )


@dataclass(slots=True)
class Trajectory:
    """One episode of one task.

    Attributes:
        task: What was played.
        member: Which of the group's episodes this is.
        attempt: 0, or how often earlier attempts at this episode failed for reasons of the environment.
        segments: The tokens; one segment where every prompt continued the one before it.
        turns: The turns, in order, summaries among them.
        outcome: How the episode ended.
        detail: A word on the outcome, for people.
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
    metrics: dict[str, float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)

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
    def forks(self) -> int:
        """How often a prompt did not continue the stored ids, and so opened a segment."""
        return max(0, sum(bool(segment.ids) for segment in self.segments) - 1)

    @property
    def fork_kinds(self) -> Counter[Fork]:
        """How often segments were opened, by kind."""
        return Counter(segment.fork for segment in self.segments if segment.fork is not None)

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
        return {
            "format": EPISODE_FORMAT,
            "task": self.task.as_dict(),
            "member": self.member,
            "attempt": self.attempt,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "reward": self.total_reward,
            "forks": self.forks,
            "metrics": self.metrics,
            "seconds": {name: round(spent, 6) for name, spent in self.timeline.seconds().items()},
            "turns": [turn.as_record() for turn in self.turns],
            "segments": [segment.as_record() for segment in self.segments],
        }

    @classmethod
    def from_record(cls, record: object) -> "Trajectory":
        """Read an episode that `as_record` wrote. Keys that it does not know are passed over.

        Raises:
            EpisodeFormatError: If it is none: the message says where, and its cost is that of reading it.
        """
        data = read_schema(record)
        lengths = [len(each.ids) for each in data.segments]
        return cls(
            task=_task(data.task),
            member=data.member,
            attempt=data.attempt,
            segments=[
                Segment.from_schema(each, f"segments.{place}", lengths)
                for place, each in enumerate(data.segments)
            ],
            turns=[
                Turn.from_schema(each, f"turns.{place}", lengths) for place, each in enumerate(data.turns)
            ],
            outcome=_member(Outcome, data.outcome, "outcome"),
            detail=data.detail,
            metrics=dict(data.metrics),
            timeline=Timeline.from_seconds(data.seconds),
        )


def _task(data: TaskSchema) -> Task:
    mixture = data.mixture
    parts = () if mixture is None else tuple(RewardPart(**dict(part)) for part in mixture.parts)
    read = None if mixture is None else RewardMixture(mixture.own, parts)
    return Task(**dict(data) | {"mixture": read})


_Enumeration = TypeVar("_Enumeration", bound=StrEnum)


def _member(kind: type[_Enumeration], value: str, name: str) -> _Enumeration:
    if value not in [*kind]:
        raise EpisodeFormatError(f"{name}: {value[:40]!r} is none of {', '.join(kind)}")
    return kind(value)
