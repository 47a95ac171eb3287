"""Token ids and log-probabilities as they were sampled.

Token ids are the record. They come from the inference engine and are never made again from text. A prompt that
does not continue the stored ids opens a new segment (counted in `Trajectory.prefix_breaks`), never a silent
re-tokenisation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from rollgym.trainer.records.experts import Experts
from rollgym.trainer.records.experts import as_record as experts_as_record
from rollgym.trainer.records.experts import from_record as experts_from_record
from rollgym.trainer.records.images import PlacedImage, read_image
from rollgym.trainer.records.schema import EpisodeFormatError, SegmentSchema, member_of, runs, spread

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
