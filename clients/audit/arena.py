"""Plays episodes: many at once, with one frame of the socket for each turn of all.

Episodes are kept as comparable and countable facts, without observations and infos, and the server's faulty answers
are recorded during play.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import orjson
from gymnasium import Space

from rollgym.clients.audit.policies import AuditPolicy, GiveUp, Player
from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.operation import Operation
from rollgym.clients.client.session import EnvSession
from rollgym.clients.measuring.statistics import Interval, mean_interval, success_rate
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import encode_value


class RecordedStep(NamedTuple):
    """The record of a reset or a step.

    Attributes:
        observation: Digest of the observation.
        reward: The reward; 0 of a reset.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
        success: `info["success"]` if it is a bool.
        valid: `info["action_is_valid"]` if it is a bool.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    valid: bool | None


@dataclass
class Episode:
    """One episode that was played.

    Attributes:
        policy: The policy that played.
        seed: The seed of the episode.
        marks: The marks of the reset and of each step.
        actions: The actions taken.
        problem: The server's problem if the episode broke off.
    """

    policy: str
    seed: int
    marks: list[RecordedStep] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    problem: ProblemError | None = None

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return max(0, len(self.marks) - 1)

    @property
    def ended(self) -> bool:
        """Whether it came to its end."""
        return bool(self.marks) and (self.marks[-1].terminated or self.marks[-1].truncated)

    @property
    def solved(self) -> bool:
        """Whether its last info said `success`."""
        return bool(self.marks) and self.marks[-1].success is True

    @property
    def total_reward(self) -> float:
        """The sum of its rewards."""
        return sum(mark.reward for mark in self.marks)


class Tally(NamedTuple):
    """How often a policy solved, and its returns.

    Attributes:
        solved: Episodes solved.
        episodes: Episodes played.
        returns: Mean of the total rewards, with its interval.
        says: Whether the environment says `success` at all.
    """

    solved: int
    episodes: int
    returns: Interval
    says: bool

    @property
    def mean_return(self) -> float:
        """Mean of the total rewards."""
        return self.returns.value

    @property
    def rate(self) -> Interval:
        """The success rate with its Wilson interval."""
        return success_rate(self.solved, self.episodes)

    def __str__(self) -> str:
        rate = self.rate
        if not self.says:
            return f"return {self.mean_return:.3g} in {self.episodes} episodes"
        return (
            f"{self.solved}/{self.episodes} solved, {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}], "
            f"return {self.mean_return:.3g}"
        )

    def numbers(self) -> dict[str, float]:
        """Return the numbers for programs."""
        rate = self.rate
        return {
            "solved": self.solved,
            "episodes": self.episodes,
            "rate": rate.value,
            "rate_low": rate.low,
            "rate_high": rate.high,
            "mean_return": self.mean_return,
            "return_low": self.returns.low,
            "return_high": self.returns.high,
        }


def tally(episodes: Sequence[Episode]) -> Tally | None:
    """Count the episodes that did not break off; None if none is left."""
    played = [episode for episode in episodes if episode.problem is None and episode.actions]
    if not played:
        return None
    returns = [episode.total_reward for episode in played]
    says = any(mark.success is not None for episode in played for mark in episode.marks)
    return Tally(sum(episode.solved for episode in played), len(played), mean_interval(returns), says)


class Watch:
    """Looks at every observation, reward and info of the audit.

    Attributes:
        looks: How many were looked at.
        steps: How many of them were steps.
        lowest: The lowest finite reward.
        highest: The highest finite reward.
    """

    def __init__(self) -> None:
        self._notes: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}
        self.looks = 0
        self.steps = 0
        self.lowest = math.inf
        self.highest = -math.inf

    def note(self, kind: str, where: str) -> None:
        """Remember that something was seen; the first few places are kept."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        notes = self._notes.setdefault(kind, [])
        if len(notes) < 3:
            notes.append(where)

    def count(self, kind: str) -> int:
        """How often something was seen."""
        return self._counts.get(kind, 0)

    def first(self, kind: str) -> str:
        """The first place of a fault, and how often it occurred in all."""
        count = self.count(kind)
        if not count:
            return ""
        return self._notes[kind][0] + (f" (and {count - 1} times more)" if count > 1 else "")

    def begun(self, where: str, space: Space[Any], observation: Any, info: Mapping[str, Any]) -> None:
        """Check the observation and the info of a reset."""
        self._look(where, space, observation)
        instruction = info.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip():
            self.note("no instruction", f"{where} gives {instruction!r}")
        if info.get("success") is True:
            self.note("success at the reset", where)

    def stepped(
        self,
        where: str,
        space: Space[Any],
        observation: Any,
        reward: float,
        ended: bool,
        info: Mapping[str, Any],
    ) -> None:
        """Check the observation, the reward and the info of a step."""
        self._look(where, space, observation)
        self.steps += 1
        if not math.isfinite(reward):
            self.note("reward not finite", f"{where} pays {reward}")
        else:
            self.lowest = min(self.lowest, reward)
            self.highest = max(self.highest, reward)
        if ended and type(info.get("success")) is not bool:
            self.note("no success", f"{where} ends with {info.get('success')!r}")

    def failed(self, where: str, problem: ProblemError) -> None:
        """Check the problem that the server returns in place of an answer."""
        if problem.code == "env_error" and "reward" in problem.detail:
            self.note("reward not finite", f"{where}: {problem.detail}")
        else:
            self.note("broke off", f"{where}: {problem}")

    def _look(self, where: str, space: Space[Any], observation: Any) -> None:
        self.looks += 1
        if observation not in space:
            text = repr(observation)
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            self.note("observation out of the space", f"{where} gives {shown}")


_WIDEST, _NARROWEST = 64, 8
_STEPS_AT_ONCE = 6_400
"""With long episodes, few play at once, so that some end in time."""

UNLIMITED_STEPS = 300
"""The step limit of episodes whose environment declares none."""


class PlannedEpisode(NamedTuple):
    """An episode that is to be played."""

    policy: AuditPolicy
    seed: int


class _Seat:
    """A session, and the game that is played in it."""

    def __init__(self, session: EnvSession) -> None:
        self.session = session
        self.index = -1
        self.episode: Episode | None = None
        self.player: Player | None = None
        self.pending: Operation | None = None


class Arena:
    """Plays episodes of one environment.

    Args:
        client: The server's client.
        env_id: The environment.
        kwargs: The kwargs that it is made with.
        watch: Checks all answers.
        max_steps: The number of steps after which an unfinished episode is abandoned.
    """

    def __init__(
        self, client: EnvClient, env_id: str, kwargs: Mapping[str, Any], watch: Watch, max_steps: int
    ) -> None:
        self._client = client
        self._env_id = env_id
        self._kwargs = kwargs
        self._watch = watch
        self._width = max(_NARROWEST, min(_WIDEST, _STEPS_AT_ONCE // max_steps))
        self.max_steps = max_steps

    @asynccontextmanager
    async def sessions(self, count: int) -> AsyncIterator[list[EnvSession]]:
        """Give new sessions, and close them afterwards."""
        made = await self._client.make_many(self._env_id, count, self._kwargs)
        try:
            yield made
        finally:
            await self._client.close_sessions(made)

    async def play(
        self,
        games: Sequence[PlannedEpisode],
        *,
        width: int | None = None,
        fresh: bool = False,
        pause_s: float = 0.0,
        max_steps: int | None = None,
        deadline: float | None = None,
        leave_invalid: int | None = None,
    ) -> list[Episode]:
        """Play games; return the episodes of the first of them, up to one that is not over in time.

        Args:
            games: The games to play.
            width: How many at once; None for a default, which is small for long episodes.
            fresh: Play each in a session of its own.
            pause_s: Seconds to wait before each of the first turns.
            max_steps: The number of steps after which episodes are abandoned.
            deadline: When to stop, on the clock `time.monotonic`.
            leave_invalid: The number of invalid actions in a row after which an episode is abandoned.
        """
        if not games:
            return []
        done: dict[int, Episode] = {}
        limit = min(max_steps or self.max_steps, self.max_steps)
        width = self._width if width is None else width
        waiting = iter(enumerate(games))
        if fresh:
            step = max(1, width)
            for first in range(0, len(games), step):
                part = games[first : first + step]
                async with self.sessions(len(part)) as made:
                    each = iter(list(enumerate(part, first)))
                    await self._rounds(made, each, done, limit, pause_s, deadline, leave_invalid)
        else:
            async with self.sessions(min(width, len(games))) as made:
                await self._rounds(made, waiting, done, limit, pause_s, deadline, leave_invalid)
        # Short episodes are over first, and often because they are solved: to keep whatever is over would favour them.
        return [done[index] for index in takewhile(done.__contains__, range(len(games)))]

    async def _rounds(
        self,
        sessions: Sequence[EnvSession],
        waiting: Iterator[tuple[int, PlannedEpisode]],
        done: dict[int, Episode],
        limit: int,
        pause_s: float,
        deadline: float | None,
        leave_invalid: int | None,
    ) -> None:
        seats = [_Seat(session) for session in sessions]
        for seat in seats:
            self._seat(seat, waiting)
        turns = 0
        while active := [seat for seat in seats if seat.pending is not None]:
            if deadline is not None and time.monotonic() > deadline:
                return
            if pause_s and turns < 4:
                await asyncio.sleep(pause_s)
            turns += 1
            results = await self._client.run_many([seat.pending for seat in active if seat.pending])
            for seat, result in zip(active, results, strict=True):
                self._take(seat, result, limit, leave_invalid)
                if seat.pending is None:
                    assert seat.episode is not None
                    done[seat.index] = seat.episode
                    self._seat(seat, waiting)

    def _seat(self, seat: _Seat, waiting: Iterator[tuple[int, PlannedEpisode]]) -> None:
        """Begin the next game, if there is one."""
        seat.pending = None
        for index, game in waiting:
            seat.index = index
            seat.episode = Episode(game.policy.name, game.seed)
            seat.player = game.policy.begin(game.seed)
            seat.pending = seat.session.plan_reset(game.seed, game.policy.options)
            return

    def _take(self, seat: _Seat, result: Any, limit: int, leave_invalid: int | None) -> None:
        """Take one answer, and plan the next action."""
        episode, player, space = seat.episode, seat.player, seat.session.observation_space
        assert episode is not None
        assert player is not None
        seat.pending = None
        where = f"{'step' if episode.marks else 'reset'} {len(episode.actions) or ''}".strip()
        where += f" with seed {episode.seed}"
        if isinstance(result, ProblemError):
            episode.problem = result
            self._watch.failed(where, result)
            return
        observation, info = result.observation, result.info
        if episode.marks:
            reward, terminated, truncated = result.reward, result.terminated, result.truncated
            self._watch.stepped(where, space, observation, reward, terminated or truncated, info)
        else:
            reward, terminated, truncated = 0.0, False, False
            self._watch.begun(where, space, observation, info)
        digest = _digest(observation, lambda: encode_value(space, observation, binary=False))
        success, valid = info.get("success"), info.get("action_is_valid")
        mark = RecordedStep(
            digest,
            reward,
            terminated,
            truncated,
            success if type(success) is bool else None,
            valid if type(valid) is bool else None,
        )
        episode.marks.append(mark)
        if terminated or truncated:
            return
        if len(episode.actions) >= limit or _only_invalid(episode, leave_invalid):
            return
        try:
            action = player(observation, info)
        except GiveUp:
            return
        episode.actions.append(action)
        seat.pending = seat.session.plan_step(action)


def _only_invalid(episode: Episode, count: int | None) -> bool:
    if count is None or len(episode.actions) < count:
        return False
    return all(mark.valid is False for mark in episode.marks[-count:])


def _digest(observation: Any, encoded: Callable[[], Any]) -> str:
    content = observation.encode() if type(observation) is str else orjson.dumps(encoded())
    return blake2b(content, digest_size=8).hexdigest()
