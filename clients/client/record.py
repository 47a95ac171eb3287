"""A client's record of a session's episode: enough to rebuild the session on another server."""

from __future__ import annotations

from typing import Any

from rollgym.clients.protocol.episode import PortableEpisode, step_digest


class EpisodeRecord:
    """Seed, options, actions and digests of the episode that a session is in.

    Args:
        env_id: The environment.
        env_version: The version that the server named.
        kwargs: The kwargs of the session, in JSON's encoding.
    """

    __slots__ = (
        "_actions",
        "_digests",
        "env_id",
        "env_version",
        "episode",
        "kwargs",
        "options",
        "reseeds",
        "reset_digest",
        "seed",
    )

    def __init__(self, env_id: str, env_version: str, kwargs: dict[str, Any]) -> None:
        self.env_id = env_id
        self.env_version = env_version
        self.kwargs = kwargs
        self.episode = 0
        self.seed: int | None = None
        self.options: dict[str, Any] | None = None
        self.reset_digest: str | None = None
        self.reseeds: list[tuple[int, int]] = []
        self._actions: list[Any] = []
        self._digests: list[str] = []

    @property
    def steps(self) -> int:
        """Steps taken in the episode."""
        return len(self._actions)

    def begin(self, episode: int, seed: int, options: dict[str, Any] | None, observation: Any) -> None:
        """Start a new record at a reset; `options` and `observation` are in JSON's encoding."""
        self.episode, self.seed, self.options = episode, seed, options
        self.reset_digest = step_digest(observation, 0.0, False, False)
        self._actions, self._digests, self.reseeds = [], [], []

    def add(self, action: Any, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Add a step; `action` and `observation` are in JSON's encoding."""
        self._actions.append(action)
        self._digests.append(step_digest(observation, reward, terminated, truncated))

    def take(self, episode: PortableEpisode) -> None:
        """Continue from a portable episode."""
        self.episode, self.seed, self.options = episode.episode, episode.seed, episode.options
        self.reset_digest = episode.reset_digest
        self._actions, self._digests = list(episode.actions), list(episode.digests)
        self.reseeds = list(episode.reseeds)

    def portable(self) -> PortableEpisode:
        """Return the episode so far."""
        return PortableEpisode(
            env_id=self.env_id,
            env_version=self.env_version,
            kwargs=self.kwargs,
            episode=self.episode,
            seed=self.seed,
            options=self.options,
            reset_digest=self.reset_digest,
            actions=list(self._actions),
            digests=list(self._digests),
            reseeds=list(self.reseeds),
        )
