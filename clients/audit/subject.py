"""The subject of an audit, and the data that its parts share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space

from rollgym.clients.audit.arena import UNLIMITED_STEPS, Arena, Episode, PlannedEpisode, Watch
from rollgym.clients.audit.policies import WORDINGS, ActionWording, AuditPolicy, listed_actions, takes_text
from rollgym.clients.checks.declared import example_replies
from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo

_LONGEST_EPISODE = 2_000


@dataclass(frozen=True)
class AuditSettings:
    """How thorough an audit is.

    Attributes:
        episodes: Episodes of each baseline.
        seed: The seed of all random draws.
        budget_s: The time limit of the audit, in seconds.
        items: Task fields for a verifier that draws no tasks itself, each an object.
    """

    episodes: int = 100
    seed: int = 0
    budget_s: float = 60.0
    items: Sequence[Mapping[str, Any]] = ()


class Budget:
    """The time that an audit may take.

    Args:
        seconds: In all, from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun = time.monotonic()

    @property
    def used(self) -> float:
        """Seconds since the audit began."""
        return time.monotonic() - self.begun

    @property
    def spent(self) -> bool:
        """Whether no time is left."""
        return self.used >= self.seconds

    def share(self, part: float) -> float:
        """Return the deadline of a share of the remaining time, by `time.monotonic`; so some is always left."""
        return time.monotonic() + part * max(0.0, self.seconds - self.used)


@dataclass
class Subject:
    """An environment under audit.

    Attributes:
        env: The server's description of it.
        kwargs: The kwargs that it is made with.
        client: The server's client.
        settings: How thorough the audit is.
        budget: The time that is left.
        action_space: The session's.
        first_info: Info of the first reset; empty if that failed.
        wording: The form of texts that the environment can read.
        resident_bytes: Returns how much memory the server's processes hold, if that can be known.
        elsewhere: Starts the same server in fresh processes with another hash seed, if it can be started.
        queued_seconds: Returns how long the server's loop has waited for a processor, if that can be known.
        watch: The faults found in the server's answers.
        played: Episodes by policy, for later checks.
    """

    env: EnvInfo
    kwargs: Mapping[str, Any]
    client: EnvClient
    settings: AuditSettings
    budget: Budget
    action_space: Space[Any]
    first_info: Mapping[str, Any]
    wording: ActionWording
    resident_bytes: Callable[[], int | None]
    elsewhere: Callable[[], AbstractAsyncContextManager[EnvClient]] | None
    queued_seconds: Callable[[], float | None]
    watch: Watch = field(default_factory=Watch)
    played: dict[str, list[Episode]] = field(default_factory=dict)

    @property
    def declared_steps(self) -> int | None:
        """The step limit that is declared for these kwargs."""
        given = self.kwargs.get("max_episode_steps")
        return given if isinstance(given, int) else self.env.max_episode_steps

    @property
    def example_replies(self) -> Sequence[Any]:
        """The example replies that the environment declares, without those that are not in its action space."""
        return [each for each in example_replies(self.env.metadata) if each in self.action_space]

    def arena(self, client: EnvClient | None = None) -> Arena:
        """Return the place to play, on this server or on another."""
        limit = self.declared_steps
        # One more than is declared, so that an episode that exceeds its limit is noticed.
        most = UNLIMITED_STEPS if limit is None else min(limit + 1, _LONGEST_EPISODE)
        return Arena(client or self.client, self.env.env_id, self.kwargs, self.watch, most)

    def seeds(self, name: str, count: int) -> list[int]:
        """Return seeds of a stream that has this name."""
        stream = np.random.SeedSequence([self.settings.seed, *name.encode()])
        return [int(each) for each in np.random.default_rng(stream).integers(2**31, size=count)]

    def games(self, policy: AuditPolicy, name: str, count: int) -> list[PlannedEpisode]:
        """Return games of a policy with the seeds of a stream."""
        return [PlannedEpisode(policy, seed) for seed in self.seeds(name, count)]

    def keep(self, episodes: Sequence[Episode]) -> None:
        """Keep episodes for those who look at them later."""
        for episode in episodes:
            self.played.setdefault(episode.policy, []).append(episode)

    def all_played(self) -> list[Episode]:
        """Return all kept episodes that did not break off."""
        return [each for group in self.played.values() for each in group if each.problem is None]


@dataclass(frozen=True)
class Discovery:
    """The results of the first session.

    Attributes:
        action_space: The session's.
        info: The info of the first reset; empty if that failed.
        wording: The form of texts that the environment can read.
    """

    action_space: Space[Any]
    info: Mapping[str, Any]
    wording: ActionWording


async def discover(client: EnvClient, env_id: str, kwargs: Mapping[str, Any]) -> Discovery:
    """Make a session, and reset it once.

    Raises:
        ProblemError: The environment does not exist, or it cannot be made.
    """
    session = await client.make(env_id, kwargs)
    info: Mapping[str, Any] = {}
    wording = ActionWording()
    try:
        _, info = await session.reset(0)
        listed = [each for each in listed_actions(info) if isinstance(each, str)]
        if takes_text(session.action_space) and listed:
            wording = await _wording(session, listed[0])
    except ProblemError as problem:
        if problem.code != "env_error":  # every part that plays will meet that, and say so
            raise
    await client.close_sessions([session])
    return Discovery(session.action_space, info, wording)


async def _wording(session: EnvSession, action: str) -> ActionWording:
    """Return the first form that the environment calls valid; the plain one if it calls none valid."""
    for wording in WORDINGS:
        await session.reset(0)
        result = await session.step(wording.write(action))
        if result.info.get("action_is_valid") is True:
            return wording
    return ActionWording()
