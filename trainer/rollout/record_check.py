"""Checks the consistency of an episode's record after the user's code has made it, or has seen it."""

from collections.abc import Sequence
from itertools import compress
from math import isfinite
from numbers import Real
from typing import Any

from rollgym.trainer.core.numbers import MOST_IDS, finite_number, integers_within
from rollgym.trainer.core.plugins import Plugin
from rollgym.trainer.records.segment import Segment
from rollgym.trainer.records.trajectory import Outcome, Trajectory, Turn

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
    if not isinstance(outcome, Outcome) or not outcome.is_result:
        results = ", ".join(each.name for each in Outcome if each.is_result)
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
    if not isinstance(outcome, Outcome):
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
