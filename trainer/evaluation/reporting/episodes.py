"""Episodes as the page shows them: turns, and every token with its numbers. The size is bounded for any episode."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rollgym.trainer.core.run_files import MODEL_FOLDER, write_errors
from rollgym.trainer.evaluation.reporting.charts import short
from rollgym.trainer.evaluation.reporting.run_folder import PlayedEpisode
from rollgym.trainer.records.trajectory import Phase, Segment, Trajectory, Turn

TokenText = Callable[[int], str]
_TOKENIZER_FILE = "tokenizer.json"
"""The name of a run's tokenizer in its directory, and in a model's folder."""
_LONGEST_TEXT = 1_200
_MOST_TURNS = 40
_MOST_TOKENS = 600
_MOST_IN_ALL = 12_000
_LONGEST_ALL = 500_000


@dataclass(frozen=True, slots=True)
class Token:
    """A token that the policy sampled, with its numbers.

    Attributes:
        text: The token's text.
        about: All that is known of it, for people.
        probability: Its probability, from 0 to 1.
        advantage: Its advantage as a part of the sample's largest one, from -1 to 1; None if it was not trained on.
        age: Age of its policy version, from 0 (the sample's newest) to 1.
    """

    text: str
    about: str
    probability: float
    advantage: float | None
    age: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that follow each other: of the prompt (only their text), or sampled."""

    prompt: str = ""
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as the page shows it."""

    number: int
    observation: str
    reply: str
    reward: str
    advantage: str
    remarks: str


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as the page shows it."""

    title: str
    pieces: tuple[Piece, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode as the page shows it.

    Attributes:
        name: Its place in the page, which stays the same during a run.
        title: The environment and task.
        step: The training step that it was played for, counted from 1.
        reward: Its total reward; what is shown is `short(reward)`.
        turn_count: Number of its steps in the environment.
        outcome: Its outcome, as text.
        facts: Names and values, for people.
        phases: Its time by phase: (phase, seconds, share of the whole).
        turns: Its turns.
        turns_left_out: Number of turns that are not shown.
        segments: Its tokens.
    """

    name: str
    title: str
    step: int
    reward: float
    turn_count: int
    outcome: str
    facts: tuple[tuple[str, str], ...]
    phases: tuple[tuple[str, str, float], ...]
    turns: tuple[TurnView, ...]
    turns_left_out: int
    segments: tuple[SegmentView, ...]


@dataclass(slots=True)
class _Budget:
    """The remaining size budget of the page."""

    tokens: int = _MOST_IN_ALL
    characters: int = _LONGEST_ALL
    largest: float = 1.0
    versions: tuple[int, int] = (0, 0)
    text: TokenText | None = field(default=None)

    def cut(self, text: str, longest: int = _LONGEST_TEXT) -> str:
        """Return a text without its middle if it is too long."""
        room = max(0, min(longest, self.characters))
        if len(text) > room:
            half = room // 2
            text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[len(text) - half :] if half else ''}"
        self.characters -= len(text)
        return text


def episode_views(episodes: Sequence[PlayedEpisode], text: TokenText | None) -> list[EpisodeView]:
    """Return what the page shows of episodes.

    Args:
        episodes: A sample of a run's.
        text: Gives the text of a token; None shows ids.
    """
    budget = _Budget(text=text)
    advantages = [
        abs(value) for each in episodes for turn in each.trajectory.turns for value in turn.advantages
    ]
    budget.largest = max(advantages, default=0.0) or 1.0
    versions = [
        version
        for each in episodes
        for segment in each.trajectory.segments
        for version in segment.versions
        if version >= 0
    ]
    budget.versions = (min(versions, default=0), max(versions, default=0))
    return [_view(each, budget) for each in episodes]


def _view(played: PlayedEpisode, budget: _Budget) -> EpisodeView:
    trajectory = played.trajectory
    task = trajectory.task
    facts = [
        ("task", str(task.index)),
        ("seed", str(task.seed)),
        ("member", str(trajectory.member)),
    ]
    if trajectory.segments:
        # Of a model behind an API no token is known.
        facts.append(("sampled tokens", f"{trajectory.action_tokens:,}"))
        facts.append(("policy version", str(trajectory.oldest_version)))
    if task.domain and task.domain != task.env_id:
        facts.insert(0, ("domain", budget.cut(task.domain, 80)))
    if trajectory.summaries:
        facts.append(("summaries", str(trajectory.summaries)))
    facts += [(budget.cut(name, 60), short(value)) for name, value in list(trajectory.metrics.items())[:12]]
    if played.decision not in ("", "kept"):
        facts.append(("left out by", budget.cut(played.decision, 80)))
    if trajectory.detail:
        facts.append(("detail", budget.cut(trajectory.detail, 300)))
    shown = trajectory.turns[:_MOST_TURNS]
    return EpisodeView(
        name=f"e{played.step}-{task.index}-{trajectory.member}",
        title=f"step {played.step + 1}: {budget.cut(task.env_id, 80)}",
        step=played.step + 1,
        reward=trajectory.total_reward,
        turn_count=len(trajectory.steps),
        outcome=trajectory.outcome.value,
        facts=tuple(facts),
        phases=_phases(trajectory),
        turns=tuple(_turn(index, turn, budget) for index, turn in enumerate(shown)),
        turns_left_out=len(trajectory.turns) - len(shown),
        segments=tuple(
            _segment(index, segment, trajectory, budget)
            for index, segment in enumerate(trajectory.segments)
            if segment.ids
        ),
    )


def _phases(trajectory: Trajectory) -> tuple[tuple[str, str, float], ...]:
    seconds = trajectory.timeline.seconds()
    whole = sum(seconds.values())
    return tuple(
        (phase.value, f"{short(seconds[phase.value])} s", seconds[phase.value] / whole)
        for phase in Phase
        if whole > 0 and seconds[phase.value] > 0
    )


def _turn(number: int, turn: Turn, budget: _Budget) -> TurnView:
    remarks = [] if turn.action_is_valid else ["unreadable reply"]
    if turn.is_summary:
        remarks.append("summary of the history")
    if turn.finish_reason != "stop":
        remarks.append(f"ended by {budget.cut(turn.finish_reason, 20)}")
    mean = sum(turn.advantages) / len(turn.advantages) if turn.advantages else None
    return TurnView(
        number=number,
        observation=budget.cut(turn.observation),
        reply=budget.cut(turn.reply),
        reward=short(turn.reward),
        advantage="" if mean is None else f"{mean:+.3f}",
        remarks=", ".join(remarks),
    )


def _segment(index: int, segment: Segment, trajectory: Trajectory, budget: _Budget) -> SegmentView:
    title = f"segment {index}: {len(segment.ids):,} tokens, {sum(segment.action_mask):,} of them sampled"
    if segment.parent is not None:
        title += f"; goes on from token {segment.parent[1]} of segment {segment.parent[0]}"
        title += f" ({segment.prefix_break.value})" if segment.prefix_break is not None else ""
    advantages = _advantages(index, trajectory.turns)
    pieces: list[Piece] = []
    room = min(_MOST_TOKENS, budget.tokens)
    end = 0
    for sampled, indices in groupby(range(len(segment.ids)), key=segment.action_mask.__getitem__):
        span = list(indices)
        if not sampled:
            # What is cut out of the text below need not be made first.
            pieces.append(Piece(prompt=budget.cut(_prompt(segment.ids, span, budget))))
        else:
            span = span[:room]
            pieces.append(Piece(tokens=tuple(_token(at, segment, advantages, budget) for at in span)))
            room -= len(span)
            budget.tokens -= len(span)
        end = span[-1] + 1 if span else end
        if room <= 0:
            break
    return SegmentView(title, tuple(pieces), len(segment.ids) - end)


def _prompt(ids: Sequence[int], span: Sequence[int], budget: _Budget) -> str:
    if len(span) > 2 * _LONGEST_TEXT:
        head, tail = span[:_LONGEST_TEXT], span[-_LONGEST_TEXT:]
        return _text(ids, head, budget) + " … " + _text(ids, tail, budget)
    return _text(ids, span, budget)


def _text(ids: Sequence[int], span: Iterable[int], budget: _Budget) -> str:
    if budget.text is None:
        return " ".join(str(ids[at]) for at in span)
    return "".join(budget.text(ids[at]) for at in span)


def _advantages(index: int, turns: Sequence[Turn]) -> dict[int, float]:
    """Return the advantage of each trained token of a segment."""
    return {
        turn.start + offset: value
        for turn in turns
        if turn.segment == index
        for offset, value in enumerate(turn.advantages)
    }


def _token(at: int, segment: Segment, advantages: dict[int, float], budget: _Budget) -> Token:
    token, logprob, version = segment.ids[at], segment.behaviour_logprobs[at], segment.versions[at]
    probability = math.exp(min(0.0, logprob))
    advantage = advantages.get(at)
    about = [f"id {token}", f"log-probability {logprob:.4f} (p {probability:.3f})"]
    about += [] if advantage is None else [f"advantage {advantage:+.4f}"]
    about += [f"version {version}", f"turn {segment.turn_index[at]}"]
    oldest, newest = budget.versions
    text = str(token) if budget.text is None else budget.text(token)
    return Token(
        text=text[:80],
        about=" · ".join(about),
        probability=probability,
        advantage=None if advantage is None else advantage / budget.largest,
        age=(newest - version) / (newest - oldest) if newest > oldest else 0.0,
    )


def token_text(directory: Path) -> TokenText | None:
    """Return a function from a run's token ids to text; None if the run left no readable tokenizer."""
    for path in (directory / _TOKENIZER_FILE, directory / MODEL_FOLDER / _TOKENIZER_FILE):
        if path.is_file():
            return _reader(path)
    return None


def keep_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a run's tokenizer to its directory; one that is Python all through has no such file.

    Raises:
        WriteError: If the disk does not take it.
    """
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        path = directory / _TOKENIZER_FILE
        with write_errors(path):
            path.write_text(fast.to_str(), encoding="utf-8")


def _reader(path: Path) -> TokenText | None:
    from tokenizers import Tokenizer  # Imported late: readers of curves may not have it.

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises no type of its own for a file that it cannot read
        return None

    def text(token: int) -> str:
        # The engine of some models knows ids that their tokenizer has no word for.
        name = tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if name is None:
            return f"[{token}]"
        if name.startswith("▁"):
            return name.replace("▁", " ")
        return tokenizer.decode([token], skip_special_tokens=False) or name

    return text
