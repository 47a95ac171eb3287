"""Writes sampled replies into the record of an episode, in order of arrival, whichever client requested them.

A prompt that continues the stored ids of a segment extends it, whichever segment that is; any other prompt opens a
segment of its own, with a link to the point of departure from its nearest relative. Sub-agents, retries, edited
histories and parallel calls thus cost segments, but no sampled token is ever made again from text (best-effort
interleaving, prime-rl #1674).

After the user's code has made a record, or has seen it, its consistency is checked here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import isfinite
from numbers import Real
from typing import Any

from rollgym.trainer.core.errors import InvalidNumberError, RunError
from rollgym.trainer.core.numbers import LARGEST, MOST_IDS, finite_number, integers_within
from rollgym.trainer.core.plugins import Plugin
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.images import PlacedImage
from rollgym.trainer.records.trajectory import PrefixBreak, Segment, Trajectory, TrajectoryOutcome, Turn

_ROUNDING = 1e-3
"""How far above 0 rounding may leave a log-probability."""


class RecordError(RunError, ValueError):
    """An inference engine's answer cannot be recorded: it broke its contract."""


class Recorder:
    """The one writer of an episode's tokens.

    A call is placed before it is sent, and recorded or withdrawn when it is over. Any number may be in flight at one
    time; a segment that one of them extends is not extended by another.

    Args:
        trajectory: The episode; segments that it holds already may be continued.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self._tree = _PrefixTree(trajectory.segments)
        self._placed: dict[int, _Placed] = {}
        for index, segment in enumerate(trajectory.segments):
            if segment.ids:
                self._tree.add(index)

    def place(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[PlacedImage] = (),
        prefix_break: PrefixBreak | None = None,
    ) -> int:
        """Return the segment that a reply to `prompt_ids` belongs to.

        That is the longest segment whose ids the prompt begins with, the newest if several are equal, or else a
        new one, also if the ids equal a segment's but their pictures do not. Its record does not
        change before `record`.

        Args:
            prompt_ids: All that the policy reads.
            images: Pictures among it.
            prefix_break: Why it opens a segment, if the caller knows; else it is determined.
        """
        prompt, shown = list(prompt_ids), list(images)
        found = self._tree.find(prompt, shown)
        index = found.continued
        if index is not None:
            segment = self.trajectory.segments[index]
            self._tree.close(index)
            self._placed[index] = _Placed(
                prompt[len(segment.ids) :], shown[len(segment.images) :], found.shared, prefix_break
            )
            return index
        index = len(self.trajectory.segments)
        self.trajectory.segments.append(Segment())
        self._placed[index] = _Placed(prompt, shown, found.shared, prefix_break)
        return index

    def record(self, index: int, result: GenerationResult, turn: int) -> tuple[int, int]:
        """Write a placed prompt and the reply to it into its segment.

        Args:
            index: The value that `place` returned.
            result: The reply.
            turn: Turn of the episode that it belongs to.

        Returns:
            Where the reply begins in the segment, and one past its end.

        Raises:
            RecordError: If ids, log-probabilities and versions are not one each for every token.
            InvalidNumberError: If a log-probability is not finite, or above 0.
        """
        if index not in self._placed:
            raise ValueError(f"no call is under way in segment {index}")
        _check(result)
        segment, placed = self.trajectory.segments[index], self._placed.pop(index)
        if not segment.ids:
            self._link(index, placed)
        segment.append_context(placed.ids)
        segment.images += placed.images
        start = len(segment.ids)
        segment.append_action(result.token_ids, result.logprobs, result.policy_versions, turn)
        if result.experts is not None:
            segment.append_experts(result.experts)
        self._tree.add(index)
        return start, len(segment.ids)

    def withdraw(self, index: int) -> None:
        """Give up a placed call that was cancelled or failed: nothing of it is recorded."""
        if self._placed.pop(index, None) is None:
            return
        segments = self.trajectory.segments
        if segments[index].ids:
            self._tree.open(index)
        elif index == len(segments) - 1:
            del segments[index]  # one before others keeps its place, empty, since they are known by theirs

    def _link(self, index: int, placed: "_Placed") -> None:
        """Record which segment a new one branched from, and at which position."""
        segments = self.trajectory.segments
        if not any(segment.ids for segment in segments):
            return
        found = self._tree.find(placed.ids, placed.images)
        segment = segments[index]
        shared = _first_difference(segments[found.nearest].images, placed.images, found.shared)
        segment.parent = (found.nearest, shared) if shared else None
        if placed.prefix_break is not None:
            segment.prefix_break = placed.prefix_break
        elif found.shared > placed.shared:
            # Its relative was recorded while this call was in flight.
            segment.prefix_break = PrefixBreak.PARALLEL
        else:
            segment.prefix_break = _kind(segments[found.nearest], shared, len(placed.ids))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A call in flight.

    Attributes:
        ids: The prompt's ids after those of its segment.
        images: Pictures among them.
        shared: Ids that it had in common with its nearest relative when it was placed.
        prefix_break: Why it opens a segment, if the caller knows.
    """

    ids: list[int]
    images: list[PlacedImage]
    shared: int
    prefix_break: PrefixBreak | None


def _first_difference(one: Sequence[PlacedImage], other: Sequence[PlacedImage], length: int) -> int:
    """Return the first position at which two sequences with the same first `length` ids show other pictures.

    Equal ids do not show which pictures the placeholders stand for. Without a difference, return `length`.
    """
    mine, theirs = set(one), set(other)
    return min((image.start for image in mine ^ theirs if image.start < length), default=length)


def _kind(parent: Segment, shared: int, prompt: int) -> PrefixBreak:
    """Return how a prompt of `prompt` ids differs from a segment after the first `shared` ids."""
    if shared < len(parent.ids) and parent.action_mask[shared]:
        at_start = shared == 0 or parent.turn_index[shared] != parent.turn_index[shared - 1]
        return PrefixBreak.RETRY if at_start and shared == prompt else PrefixBreak.REWRITE
    return PrefixBreak.BRANCH if True in parent.action_mask[:shared] else PrefixBreak.CONVERSATION


def _check(result: GenerationResult) -> None:
    """Refuse a reply that no record can hold: the policy's weights are broken, or its engine is.

    Raises:
        RecordError: Not every token has its log-probability and its version, or one of them is invalid.
        InvalidNumberError: A log-probability is not finite, or above 0.
    """
    ids, logprobs, versions = result.token_ids, result.logprobs, result.policy_versions
    if not len(ids) == len(logprobs) == len(versions):
        raise RecordError(
            f"a reply of {len(ids)} tokens came with {len(logprobs)} log-probabilities and {len(versions)} versions"
        )
    for name, values in (("token id", ids), ("policy version", versions)):
        for number in values:
            if type(number) is not int or number < 0:
                raise RecordError(f"the inference engine answered with {str(number)[:40]!r} as a {name}")
    if all(type(value) is float and -LARGEST <= value <= _ROUNDING for value in logprobs):
        return
    for value in logprobs:
        if not finite_number(value, "a log-probability of the inference engine") <= _ROUNDING:
            raise InvalidNumberError(f"a log-probability of the inference engine is {value:g}, above 0")


@dataclass(slots=True)
class _Node:
    """A point at which segments branch or end.

    Attributes:
        edges: Continuations from this point, by their first id.
        ends: Segments that end here and can be extended, the newest last.
    """

    edges: dict[int, "_Edge"] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Edge:
    """Ids that lead from one node to the next: those of a segment between two places."""

    segment: int
    start: int
    end: int
    node: _Node


@dataclass(frozen=True, slots=True)
class _Found:
    """How far the stored segments agree with a prompt.

    Attributes:
        continued: The segment that the prompt continues, if there is one.
        nearest: A segment that begins with as many of the prompt's ids as any does.
        shared: Number of the prompt's first ids that `nearest` begins with.
    """

    continued: int | None
    nearest: int
    shared: int


class _PrefixTree:
    """The ids of all segments, common beginnings once, so that finding a prompt costs no more than reading it.

    Args:
        segments: The segments. They only grow at their ends.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._root = _Node()
        self._ends: dict[int, tuple[_Node, int]] = {}

    def find(self, prompt: list[int], images: list[PlacedImage]) -> _Found:
        """Follow a prompt as far as the stored ids go; it continues segments that show its own pictures only."""
        node, depth, nearest = self._root, 0, 0
        continued = None
        while depth < len(prompt) and (edge := node.edges.get(prompt[depth])) is not None:
            nearest = edge.segment
            common = self._common(prompt, edge, depth)
            depth += common
            if common < edge.end - edge.start:
                break
            node = edge.node
            for end in reversed(node.ends):
                # Another request may have extended the segment since: it then ends elsewhere.
                if self._goes_on(end, depth, images):
                    continued = end
                    break
        return _Found(continued, nearest, depth)

    def _goes_on(self, index: int, depth: int, images: list[PlacedImage]) -> bool:
        """Whether a segment still ends at the noted position, and shows a prompt's first pictures."""
        segment = self._segments[index]
        shown = segment.images
        return len(segment.ids) == depth and (not shown or shown == images[: len(shown)])

    def add(self, index: int) -> None:
        """Insert a segment's new ids into the tree, so that prompts can continue it."""
        ids = self._segments[index].ids
        node, depth = self._ends.get(index, (self._root, 0))
        while depth < len(ids):
            edge = node.edges.get(ids[depth])
            if edge is None:
                edge = node.edges[ids[depth]] = _Edge(index, depth, len(ids), _Node())
            common = self._common(ids, edge, depth)
            if common < edge.end - edge.start:
                _split(edge, common, self._segments[edge.segment].ids)
            node, depth = edge.node, depth + common
        self._ends[index] = node, depth
        self.open(index)

    def open(self, index: int) -> None:
        """Allow prompts to continue a segment again."""
        self._ends[index][0].ends.append(index)

    def close(self, index: int) -> None:
        """Exclude a segment from continuation for now."""
        self._ends[index][0].ends.remove(index)

    def _common(self, ids: list[int], edge: _Edge, depth: int) -> int:
        """Return how many ids of an edge `ids` has from `depth` on."""
        own = self._segments[edge.segment].ids
        low, high = 0, min(edge.end - edge.start, len(ids) - depth)
        if ids[depth : depth + high] == own[edge.start : edge.start + high]:
            return high
        while high - low > 1:  # the first `low` are equal, the first `high` are not
            middle = (low + high) // 2
            if ids[depth + low : depth + middle] == own[edge.start + low : edge.start + middle]:
                low = middle
            else:
                high = middle
        return low


def _split(edge: _Edge, length: int, ids: list[int]) -> None:
    """Insert a node into an edge, after its first `length` ids."""
    middle = edge.start + length
    node = _Node({ids[middle]: _Edge(edge.segment, middle, edge.end, edge.node)})
    edge.end, edge.node = middle, node


_OWN_IDS = ": record the ids that the policy's own tokenizer or `actor.act` gave"


def check_record(trajectory: Trajectory, agent: Plugin, vocabulary: int) -> None:
    """Check a record that a user's agent made, and convert its numbers to their declared types.

    Args:
        trajectory: The record.
        agent: The agent that made it, for messages.
        vocabulary: Number of token ids that the model knows.

    Raises:
        PluginError: If it is inconsistent.
        InvalidNumberError: If a number of it is not finite, or an id is not in the model's vocabulary.
    """
    with agent.running():  # its lists may hold anything
        if fault := _fault(trajectory):
            raise agent.broken(f"returned a record that does not fit together: {fault}")
        _check_numbers(trajectory, vocabulary)


class ShownRecords:
    """Episodes for a user's function: it may write remarks into them, and must not change what was played.

    Args:
        trajectories: The episodes.
        function: The function that receives them.
    """

    def __init__(self, trajectories: Sequence[Trajectory], function: Plugin) -> None:
        self._trajectories = list(trajectories)
        self._function = function
        self._played = [_played(trajectory) for trajectory in trajectories]

    def check(self) -> None:
        """Check that only remarks have changed.

        Raises:
            PluginError: If what was played has changed, or a remark is invalid.
        """
        with self._function.running():
            for trajectory, played in zip(self._trajectories, self._played, strict=True):
                fault = _change(played, _played(trajectory)) or _remark_fault(trajectory)
                if fault is not None:
                    raise self._function.broken(
                        f"must leave the episodes that it is shown as they are: {fault}"
                    )


def _played(trajectory: Trajectory) -> dict[str, Any]:
    """Return what of an episode was played, by what it is called."""
    return {
        "task": (trajectory.task, trajectory.member, trajectory.attempt),
        "number of turns": len(trajectory.turns),
        "place of a turn's tokens": [(turn.segment, turn.start, turn.end) for turn in trajectory.turns],
        "number of segments": len(trajectory.segments),
        "ids": [list(segment.ids) for segment in trajectory.segments],
        "mask": [list(segment.action_mask) for segment in trajectory.segments],
        "log-probabilities": [list(segment.behaviour_logprobs) for segment in trajectory.segments],
        "policy versions": [list(segment.versions) for segment in trajectory.segments],
        "turns of tokens": [list(segment.turn_index) for segment in trajectory.segments],
    }


def _change(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    changed = next((name for name, value in before.items() if after[name] != value), None)
    return None if changed is None else f"it has changed their {changed}"


def _remark_fault(trajectory: Trajectory) -> str | None:
    """Return what is wrong with what may be written into an episode; None if nothing is."""
    outcome: object = trajectory.outcome
    if not isinstance(outcome, TrajectoryOutcome) or not outcome.is_result:
        results = ", ".join(each.name for each in TrajectoryOutcome if each.is_result)
        return f"its outcome {outcome!r:.40} is none of {results}"
    for index, turn in enumerate(trajectory.turns):
        if (wrong := _turn_fault(turn)) is not None:
            return f"the {wrong} of turn {index} is none any more"
    for name, value in trajectory.metrics.items():
        if not _is_number(value):
            return f"its metric {name!r:.40} is {value!r:.40}, which is no finite number"
    return None


def _turn_fault(turn: Turn) -> str | None:
    texts: list[object] = [turn.observation, turn.reply, turn.finish_reason]
    if turn.anchor is not None:
        texts.append(turn.anchor)
    if not all(isinstance(text, str) for text in texts):
        return "text"
    return None if _is_number(turn.format_penalty) else "format_penalty"


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def _fault(trajectory: Trajectory) -> str | None:
    """Return what of a record that other code than ours wrote does not fit together."""
    outcome: object = trajectory.outcome
    if not isinstance(outcome, TrajectoryOutcome):
        return f"its outcome {outcome!r:.40} is no Outcome"
    for index, segment in enumerate(trajectory.segments):
        lengths = {len(part) for part in _lists(segment)}
        if lengths != {len(segment.ids)}:
            return f"the lists of segment {index} differ in length"
        if any(each not in (False, True) for each in segment.action_mask):
            return f"the mask of segment {index} holds more than truth values"
        sampled = compress(segment.turn_index, segment.action_mask)
        if outcome.is_result and any(not 0 <= turn < len(trajectory.turns) for turn in sampled):
            return f"a sampled token of segment {index} is of a turn that there is not"
    for index, turn in enumerate(trajectory.turns):
        if turn.start != turn.end and not _is_span(turn, trajectory):
            return f"turn {index} is not within its segment"
    return None


def _lists(segment: Segment) -> tuple[list[int], list[bool], list[float], list[int], list[int]]:
    return segment.ids, segment.action_mask, segment.behaviour_logprobs, segment.versions, segment.turn_index


def _is_span(turn: Turn, trajectory: Trajectory) -> bool:
    if not 0 <= turn.segment < len(trajectory.segments):
        return False
    return 0 <= turn.start < turn.end <= len(trajectory.segments[turn.segment].ids)


def _check_numbers(trajectory: Trajectory, vocabulary: int) -> None:
    for turn in trajectory.turns:
        turn.reward = finite_number(turn.reward, "a turn's reward")
        turn.format_penalty = finite_number(turn.format_penalty, "a turn's format penalty")
    trajectory.metrics = {
        name: finite_number(float(value), f"the metric {name!r:.40} of the record")
        for name, value in trajectory.metrics.items()
    }
    for index, segment in enumerate(trajectory.segments):
        where = f"of segment {index} of the record"
        segment.ids = integers_within(segment.ids, range(vocabulary), f"a token id {where}", _OWN_IDS)
        segment.versions = integers_within(segment.versions, range(-1, MOST_IDS), f"a policy version {where}")
        segment.behaviour_logprobs = [
            finite_number(each, "a log-probability of the record") for each in segment.behaviour_logprobs
        ]
