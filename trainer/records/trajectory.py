"""The record of an episode, turn by turn: texts and results, the tokens as they were sampled, and where time went.

Token ids are the record. They come from the inference engine and are never made again from text. A prompt that does not
continue the stored ids opens a new segment (counted in `Trajectory.prefix_breaks`), never a silent re-tokenisation.

As plain data (`rollgym.trainer.records.schema`) a trajectory is complete: it can be read back.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Any, Self, TypeVar

import numpy as np

from rollgym.trainer.records.experts import Experts
from rollgym.trainer.records.experts import as_record as experts_as_record
from rollgym.trainer.records.experts import from_record as experts_from_record
from rollgym.trainer.records.images import PlacedImage, read_image
from rollgym.trainer.records.schema import (
    EPISODE_FORMAT,
    EpisodeFormatError,
    SegmentSchema,
    TaskSchema,
    TurnSchema,
    member_of,
    read_schema,
    runs,
    spread,
)
from rollgym.trainer.tasks.task import RewardMixture, RewardPart, Task

_Value = TypeVar("_Value", int, float)


class PrefixBreak(StrEnum):
    """Why a prompt opened a segment in place of continuing one: how it differs from its nearest relative."""

    RETRY = "retry"
    """Nowhere: the same prompt was asked again."""
    PARALLEL = "parallel"
    """Its relative was being sampled at the same time."""
    BRANCH = "branch"
    """After a reply: a conversation continues differently."""
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
        behaviour_logprobs: Log-probability of the sampled token under the behaviour policy; 0.0 outside the mask.
        versions: Policy version that sampled the token; -1 outside the mask.
        turn_index: Turn of the episode that the sampled token belongs to; -1 outside the mask.
        parent: The segment that it shares its beginning with, and the number of shared ids; None without one.
        prefix_break: Why it was opened; None for an episode's first segment.
        images: Pictures that the policy was shown, and the tokens that stand for them, in order.
        experts: Experts that the first tokens were routed to when replies were drawn, `[tokens, layers * taken]`; None
            if no server reported them.
    """

    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    parent: tuple[int, int] | None = None
    prefix_break: PrefixBreak | None = None
    images: list[PlacedImage] = field(default_factory=list)
    experts: Experts | None = field(default=None, compare=False, repr=False)

    def append_context(self, ids: list[int]) -> None:
        """Append tokens that the policy reads but did not choose."""
        count = len(ids)
        self.ids += ids
        self.action_mask += [False] * count
        self.behaviour_logprobs += [0.0] * count
        self.versions += [-1] * count
        self.turn_index += [-1] * count

    def append_action(
        self, ids: list[int], behaviour_logprobs: list[float], versions: list[int], turn: int
    ) -> None:
        """Append tokens that the policy sampled in `turn`.

        Raises:
            ValueError: If ids, log-probabilities and versions differ in length: the inference engine broke its
                contract.
        """
        if not len(ids) == len(behaviour_logprobs) == len(versions):
            raise ValueError(
                f"a reply of {len(ids)} tokens came with {len(behaviour_logprobs)} log-probabilities "
                f"and {len(versions)} versions"
            )
        self.ids += ids
        self.action_mask += [True] * len(ids)
        self.behaviour_logprobs += behaviour_logprobs
        self.versions += versions
        self.turn_index += [turn] * len(ids)

    def append_experts(self, experts: Experts) -> None:
        """Store the experts of the tokens whose experts are unknown so far.

        Args:
            experts: Experts of the segment's tokens from the first on, as the server computed them for its last reply.
        """
        known = 0 if self.experts is None else len(self.experts)
        more = experts[known : len(self.ids)]
        self.experts = more if self.experts is None else np.concatenate([self.experts, more])

    def as_record(self) -> dict[str, Any]:
        """Return the segment as plain data, by the keys that files have: two of them differ from the attributes."""
        return {
            "ids": self.ids,
            "action_mask": [int(flag) for flag in self.action_mask],
            "logprobs": self._sampled(self.behaviour_logprobs),
            "versions": runs(self._sampled(self.versions)),
            "turn_index": runs(self._sampled(self.turn_index)),
            "parent": None if self.parent is None else list(self.parent),
            "fork": self.prefix_break,
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
            data: The output of `as_record`.
            name: Its name in messages.
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
            behaviour_logprobs=_placed(data.logprobs, mask, 0.0),
            versions=_placed(spread(data.versions, sampled, f"{name}.versions"), mask, -1),
            turn_index=_placed(spread(data.turn_index, sampled, f"{name}.turn_index"), mask, -1),
            parent=parent,
            prefix_break=None if data.fork is None else member_of(PrefixBreak, data.fork, f"{name}.fork"),
            images=[
                read_image(each.start, each.end, each.png, len(data.ids), f"{name}.images.{index}")
                for index, each in enumerate(data.images)
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


class Phase(StrEnum):
    """The things that an episode can wait for. If several occur at one time, the first of them in this order counts."""

    GENERATE = "generate"
    VERIFY = "verify"
    ENVIRONMENT = "environment"
    QUEUE = "queue"
    AGENT = "agent"


_NAMES = tuple(phase.value for phase in Phase)


class _During:
    """A context in which an episode waits. Written out: every turn of every episode goes through two of them."""

    __slots__ = ("_phase", "_timeline")

    def __init__(self, timeline: "Timeline", phase: Phase) -> None:
        self._timeline, self._phase = timeline, phase

    def __enter__(self) -> None:
        self._timeline.begin(self._phase)

    def __exit__(self, *_: object) -> None:
        self._timeline.done(self._phase)


@dataclass(slots=True)
class Timeline:
    """The phases of one episode, each until the next one begins.

    Attributes:
        clock: Gives the time in seconds; only differences mean anything.
        marks: When each phase began, in order: (time, phase).
        ended: When the episode ended; None while it runs.
    """

    clock: Callable[[], float] = time.monotonic
    marks: list[tuple[float, Phase]] = field(default_factory=list)
    ended: float | None = None
    _under_way: list[Phase] = field(default_factory=list)

    @classmethod
    def from_seconds(cls, seconds: Mapping[str, float]) -> Self:
        """Return a timeline that is over, with phases of these lengths one after the other."""
        timeline = cls(clock=lambda: 0.0)
        end = 0.0
        timeline.marks = []
        for phase in Phase:
            timeline.marks.append((end, phase))
            end += seconds.get(phase.value, 0.0)
        timeline.ended = end
        return timeline

    def __post_init__(self) -> None:
        self.marks.append((self.clock(), Phase.AGENT))

    def during(self, phase: Phase) -> "_During":
        """Note that the episode waits for `phase` inside the context."""
        return _During(self, phase)

    def begin(self, phase: Phase) -> None:
        """Note that the episode waits for `phase` from now on, in addition to its other waits."""
        self._under_way.append(phase)
        self._mark()

    def done(self, phase: Phase) -> None:
        """Note the end of the wait for `phase`."""
        self._under_way.remove(phase)
        self._mark()

    def queued(self, since: float, until: float) -> None:
        """Note that the episode waited for its session before this timeline was made."""
        made = self.marks[0][0]
        self.marks[:0] = [(min(since, made), Phase.QUEUE), (min(until, made), Phase.AGENT)]

    def end(self) -> None:
        """Note that the episode is over; later marks are ignored."""
        if self.ended is None:
            self.ended = self.clock()

    def spans(self) -> list[tuple[float, float, Phase]]:
        """Return the phases as (from, until, phase), without gaps or overlaps."""
        end = self.clock() if self.ended is None else self.ended
        ends = [moment for moment, _ in self.marks[1:]] + [end]
        return [
            (start, min(until, end), phase)
            for (start, phase), until in zip(self.marks, ends, strict=True)
            if start < min(until, end)
        ]

    def seconds(self) -> dict[str, float]:
        """Return how long each phase lasted in all; together they are the episode's whole time."""
        totals = dict.fromkeys(_NAMES, 0.0)
        for start, until, phase in self.spans():
            totals[phase.value] += until - start
        return totals

    def _mark(self) -> None:
        waits = self._under_way
        if not waits:
            phase = Phase.AGENT
        elif len(waits) == 1:
            phase = waits[0]
        else:
            phase = next(phase for phase in Phase if phase in waits)
        if phase is not self.marks[-1][1]:
            self.marks.append((self.clock(), phase))


class TrajectoryOutcome(StrEnum):
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
        return self in (
            TrajectoryOutcome.SOLVED,
            TrajectoryOutcome.FAILED,
            TrajectoryOutcome.TRUNCATED,
            TrajectoryOutcome.CONTEXT_OVERFLOW,
        )


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
    outcome: TrajectoryOutcome = TrajectoryOutcome.TRUNCATED
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
        return self.outcome is TrajectoryOutcome.SOLVED

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
            outcome=member_of(TrajectoryOutcome, data.outcome, "outcome"),
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
