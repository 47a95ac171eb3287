"""The record of an evaluated episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollgym.clients.evaluation.chat import Failure, Reply


class Outcome(StrEnum):
    """How an episode ended, in the words of training runs. The last three say nothing of the model."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    CONTEXT_OVERFLOW = "context_overflow"
    AGENT_ERROR = "agent_error"
    ENVIRONMENT_ERROR = "environment_error"
    INVALID_NUMBER = "invalid_number"

    @property
    def is_result(self) -> bool:
        """Whether the model earned it; the others are counted apart, never as reward 0."""
        return self in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED, Outcome.CONTEXT_OVERFLOW)


@dataclass(slots=True)
class EvaluatedTurn:
    """A reply, and the environment's response to it.

    Attributes:
        observation: The observation that the model was shown.
        reply: The model's reply.
        action: The action that the environment received; None if it received none.
        reward: The reward of the step.
        valid: Whether the environment could read the action.
        format_penalty: The part of the reward that punishes an unreadable action.
        anchor: The key of the state, if the environment gives one.
    """

    observation: str
    reply: Reply
    action: str | None = None
    reward: float = 0.0
    valid: bool = True
    format_penalty: float = 0.0
    anchor: str | None = None


@dataclass(slots=True)
class EvaluatedEpisode:
    """One episode of one seed.

    Attributes:
        index: Its place in the evaluation.
        seed: Its seed.
        outcome: How it ended.
        detail: A word on the outcome.
        failure: Why there was no reply, if that ended the episode.
        success: The environment's verdict; None if it gives none.
        turns: The turns, in order.
        messages: The conversation, as a chat API takes it.
        metrics: Numbers that the environment reported at the end.
        seconds: How long it took.
    """

    index: int
    seed: int
    outcome: Outcome = Outcome.TRUNCATED
    detail: str = ""
    failure: Failure | None = None
    success: bool | None = None
    turns: list[EvaluatedTurn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)
