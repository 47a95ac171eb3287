"""What a server keeps of every session, wherever its environment is."""

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from env_server.journal.journal import EndReason

if TYPE_CHECKING:
    from env_server.catalog.catalog import CatalogEntry


class BaseSession(ABC):
    """One session of one caller.

    Attributes:
        session_id: Its id.
        owner: The name of the token that made it.
        entry: What it is a session of.
        idle_timeout_s: The session is evicted when it was not used for so long.
        last_used: When it was last used, on the event loop's clock.
        lingers: Whether it was made on a socket, and ends some time after its last socket.
        orphaned_at: When its last socket dropped, while it has none.
        sockets: The names of the open sockets that have used it.
        episode: Index of the episode; -1 before the first reset.
        step: Steps taken in the episode; the index of the next one.
        seed: Seed of the episode.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
    """

    __slots__ = (
        "entry",
        "episode",
        "idle_timeout_s",
        "last_used",
        "lingers",
        "orphaned_at",
        "owner",
        "seed",
        "session_id",
        "sockets",
        "step",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        session_id: str,
        *,
        entry: "CatalogEntry",
        owner: str,
        idle_timeout_s: float,
        now: float,
    ) -> None:
        self.session_id = session_id
        self.owner = owner
        self.entry = entry
        self.idle_timeout_s = idle_timeout_s
        self.last_used = now
        self.lingers = False
        self.orphaned_at: float | None = None
        self.sockets: set[str] = set()
        self.episode = -1
        self.step = 0
        self.seed: int | None = None
        self.terminated = False
        self.truncated = False

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether an operation runs, which counts as use."""

    @property
    @abstractmethod
    def is_playing(self) -> bool:
        """Whether an episode has begun, and neither ended nor broken off."""

    @abstractmethod
    def let_go(self, reason: EndReason) -> Coroutine[Any, Any, None] | None:
        """Give running operations up and close the environment; what takes time is left to the caller."""

    def use_from(self, socket: str) -> None:
        """Note that a socket uses it, by whose name it is not known yet."""
        self.sockets.add(socket)
        self.orphaned_at = None

    def describe(self, now: float) -> dict[str, Any]:
        """What lists of sessions show."""
        return {
            "session_id": self.session_id,
            "env_id": self.entry.env_id,
            "episode": self.episode if self.episode >= 0 else None,
            "step": self.step if self.episode >= 0 else None,
            "seed": self.seed,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "idle_s": round(max(0.0, now - self.last_used), 3),
            "owner": self.owner,
        }
