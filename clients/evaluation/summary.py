"""The episodes of an evaluation and their summary: rates with intervals, tokens, cost, latency, counts of failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rollgym.clients.evaluation.chat import Failure, ModelReply
from rollgym.clients.measuring.statistics import Interval, mean_interval, success_rate


class EpisodeOutcome(StrEnum):
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
        return self in (
            EpisodeOutcome.SOLVED,
            EpisodeOutcome.FAILED,
            EpisodeOutcome.TRUNCATED,
            EpisodeOutcome.CONTEXT_OVERFLOW,
        )


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
    reply: ModelReply
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
    outcome: EpisodeOutcome = EpisodeOutcome.TRUNCATED
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


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a million tokens, in any currency.

    Attributes:
        prompt: Of tokens that the model reads.
        completion: Of tokens that it writes.
    """

    prompt: float
    completion: float


@dataclass(frozen=True, slots=True)
class ReplyCounts:
    """How many replies were of which kind; one may be of several.

    Attributes:
        total: All of them.
        unreadable: By the environment, or by the form of a call, it is not an action.
        cut: Ended by the length limit.
        refused: The model refused, or its content was filtered.
        empty: Neither text nor a call.
    """

    total: int
    unreadable: int
    cut: int
    refused: int
    empty: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of an evaluation. Rates and means are over the episodes that the model has played to an end.

    Attributes:
        asked: Requested episodes.
        played: Episodes that ended in any way.
        results: Those of them that measure the model.
        success: Share that succeeded, with its Wilson interval; None if the environment does not report it.
        reward: Mean reward of an episode; None without results.
        turns: Mean turns of an episode; None without results.
        prompt_tokens: Of all replies; None if the server does not report every one.
        completion_tokens: Of all replies; None if the server does not report every one.
        cost: Of all replies; None if neither prices nor the server give it.
        cost_source: `prices`, `server` or empty.
        latency_median_s: Of a reply.
        latency_p95_s: Of a reply.
        outcomes: Episodes by outcome.
        failures: Episodes without a reply, by reason.
        replies: Replies by kind.
        retried: Repeated requests by reason.
        seconds: How long the evaluation took.
    """

    asked: int
    played: int
    results: int
    success: Interval | None
    reward: Interval | None
    turns: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: float | None
    cost_source: str
    latency_median_s: float | None
    latency_p95_s: float | None
    outcomes: Mapping[EpisodeOutcome, int]
    failures: Mapping[Failure, int]
    replies: ReplyCounts
    retried: Mapping[Failure, int]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        data = asdict(self)
        for name in ("outcomes", "failures", "retried"):
            data[name] = {str(key): count for key, count in data[name].items()}
        return data


def summarise(
    episodes: Sequence[EvaluatedEpisode],
    *,
    asked: int,
    retried: Mapping[Failure, int],
    prices: Prices | None,
    seconds: float,
) -> Summary:
    """Return the summary of episodes."""
    results = [episode for episode in episodes if episode.outcome.is_result]
    told = [episode for episode in results if episode.success is not None]
    turns = [turn for episode in episodes for turn in episode.turns]
    replies = [turn.reply for turn in turns]
    prompt, completion = _total(replies, "prompt_tokens"), _total(replies, "completion_tokens")
    cost, cost_source = _cost(replies, prompt, completion, prices)
    latencies = [reply.seconds for reply in replies]
    return Summary(
        asked=asked,
        played=len(episodes),
        results=len(results),
        success=success_rate(sum(bool(each.success) for each in told), len(told)) if told else None,
        reward=mean_interval([episode.reward for episode in results]) if results else None,
        turns=sum(len(episode.turns) for episode in results) / len(results) if results else None,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost=cost,
        cost_source=cost_source,
        latency_median_s=float(np.median(latencies)) if latencies else None,
        latency_p95_s=float(np.quantile(latencies, 0.95)) if latencies else None,
        outcomes=dict(Counter(episode.outcome for episode in episodes)),
        failures=dict(Counter(each.failure for each in episodes if each.failure is not None)),
        replies=ReplyCounts(
            total=len(replies),
            unreadable=sum(not turn.valid for turn in turns),
            cut=sum(reply.finish_reason == "length" for reply in replies),
            refused=sum(bool(reply.refusal) or reply.finish_reason == "content_filter" for reply in replies),
            empty=sum(not (reply.content or reply.refusal or reply.calls) for reply in replies),
        ),
        retried=dict(retried),
        seconds=seconds,
    )


def _total(replies: Sequence[ModelReply], name: str) -> int | None:
    """Return a sum over all replies; None if one of them is unknown."""
    counts = [getattr(reply, name) for reply in replies]
    return None if not counts or None in counts else sum(counts)


def _cost(
    replies: Sequence[ModelReply], prompt: int | None, completion: int | None, prices: Prices | None
) -> tuple[float | None, str]:
    if prices is not None:
        if prompt is None or completion is None:
            return None, ""
        return (prompt * prices.prompt + completion * prices.completion) / 1e6, "prices"
    told = [reply.cost for reply in replies if reply.cost is not None]
    return (sum(told), "server") if told and len(told) == len(replies) else (None, "")


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary for people, as names and values that fit into 80 columns."""
    lines: list[tuple[str, str]] = []
    if summary.success is not None:
        lines.append(
            ("success", f"{summary.success}  {summary.outcomes.get(EpisodeOutcome.SOLVED, 0)} {_in(summary)}")
        )
    else:
        lines.append(("success", "not known" if not summary.results else "the environment does not say"))
    if summary.reward is not None:
        lines.append(("reward", f"{summary.reward}  mean of an episode"))
        lines.append(("turns", f"{summary.turns:.1f} in an episode"))
    lines.append(("tokens", _tokens(summary)))
    lines.append(("cost", _cost_text(summary)))
    if summary.latency_median_s is not None:
        lines.append(
            (
                "latency",
                f"{summary.latency_median_s:.2f} s median, {summary.latency_p95_s:.2f} s p95 of a reply",
            )
        )
    lines.append(
        ("outcomes", _counts({each.value.replace("_", " "): n for each, n in summary.outcomes.items()}))
    )
    if summary.failures:
        lines.append(("no reply", _counts({each.value: n for each, n in summary.failures.items()})))
    replies = summary.replies
    kinds = {
        "unreadable": replies.unreadable,
        "cut at the length limit": replies.cut,
        "refused": replies.refused,
        "empty": replies.empty,
    }
    lines.append(
        ("replies", f"{replies.total:,}: {_counts({k: n for k, n in kinds.items() if n}) or 'all readable'}")
    )
    if summary.retried:
        lines.append(("retried", _counts({each.value: n for each, n in summary.retried.items()})))
    return lines


def _in(summary: Summary) -> str:
    left_out = summary.asked - summary.results
    return f"of {summary.results}" + (f" ({left_out} of {summary.asked} not counted)" if left_out else "")


def _tokens(summary: Summary) -> str:
    if summary.prompt_tokens is None or summary.completion_tokens is None:
        return "the model server does not report them"
    return f"{summary.prompt_tokens:,} read, {summary.completion_tokens:,} written"


def _cost_text(summary: Summary) -> str:
    if summary.cost is None:
        return "not known: give --price-in and --price-out"
    source = (
        "by --price-in and --price-out" if summary.cost_source == "prices" else "as the model server reports"
    )
    return f"{summary.cost:.2f} {source}" if summary.cost >= 1 else f"{summary.cost:.2g} {source}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
