"""The sessions that are open, by keys that nobody can guess."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from trainer.rollout.agents.environment import EpisodeEnvironment
from trainer.rollout.agents.errors import ApiError
from trainer.rollout.agents.session import AgentSession

_REMEMBERED = 4096
"""Keys of ended sessions that are told from unknown ones."""


@dataclass(frozen=True, slots=True)
class _Open:
    session: AgentSession
    environment: EpisodeEnvironment | None


class SessionTable:
    """Sessions by key.

    Args:
        model: The name that the policy has in the API.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: AgentSession, environment: EpisodeEnvironment | None = None) -> str:
        """Open a session and return its key."""
        key = secrets.token_urlsafe(24)
        self._open[key] = _Open(session, environment)
        return key

    def remove(self, key: str) -> None:
        """End a session: its requests are given up, and it is told from one that never was."""
        found = self._open.pop(key, None)
        if found is not None:
            found.session.end()
            self._ended[key] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def session(self, key: str) -> AgentSession:
        """Return a session.

        Raises:
            ApiError: There is none of that key, or it has ended.
        """
        return self._found(key).session

    def environment(self, key: str) -> EpisodeEnvironment | None:
        """Return the environment of a session; None where it has none."""
        return self._found(key).environment

    def posted(self, key: str) -> None:
        """Nothing to do: who opened the session waits for its end."""

    def _found(self, key: str) -> _Open:
        found = self._open.get(key)
        if found is None:
            if key in self._ended:
                raise ApiError(410, "the episode of this session has ended", "session_ended")
            raise ApiError(404, "there is no session of this key", "unknown_session")
        return found
