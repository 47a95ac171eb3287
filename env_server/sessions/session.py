"""A session: one environment of one caller, and the state of its episode."""

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium import Space

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import encode_value
from rollgym.env_server.catalog.actions import action_reader
from rollgym.env_server.sessions.journal import EndReason
from rollgym.env_server.workers.base import StepOutcome, Worker
from rollgym.env_server.workers.inline import InlineWorker

if TYPE_CHECKING:
    from rollgym.env_server.catalog.catalog import CatalogEntry
    from rollgym.env_server.sessions.journal import Journal

_REMEMBERED_RESETS = 4
NO_REQUEST = ""
"""The key of a reset whose request had no id, or an id that is no longer known."""


class BaseSession(ABC):
    """One session of one caller.

    Attributes:
        session_id: Its id.
        owner: The name of the token that made it.
        entry: The environment's catalog entry.
        idle_timeout_s: The session is evicted after so many idle seconds.
        last_used: When it was last used, on the event loop's clock.
        lingers: Whether it was made on a socket, and ends some time after its last socket.
        orphaned_at: When its last socket dropped, while it has none.
        sockets: The names of the open sockets that have used it.
        episode: Index of the episode; -1 before the first reset.
        step: Steps taken in the episode; the index of the next one.
        seed: Seed of the episode.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
        call_id: The id that a client of another protocol gave to the call that runs on it, if one runs.
    """

    __slots__ = (
        "call_id",
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
        self.call_id: str | None = None

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
        """Cancel running operations and close the environment; return slow work for the caller to await."""

    def use_from(self, socket: str) -> None:
        """Register a socket that uses the session for the first time."""
        self.sockets.add(socket)
        self.orphaned_at = None

    def describe(self, now: float) -> dict[str, Any]:
        """The entry of the session in lists."""
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


class ResetRecord(NamedTuple):
    """How an episode began: the answer to its reset."""

    observation: Any
    info: Mapping[str, Any]
    episode: int
    seed: int


class StepRecord(NamedTuple):
    """The last step taken, kept so that it can be answered again.

    Attributes:
        episode: The episode it belongs to.
        step: The index that the request named.
        action: The action in JSON's encoding.
        outcome: The environment's answer, or the problem that the step ended in.
        seen: The observation in JSON's encoding.
        reset: The episode that the step began, if requested (`autoreset`).
    """

    episode: int
    step: int
    action: Any
    outcome: "StepOutcome | ProblemError"
    seen: Any = None
    reset: ResetRecord | None = None


class Running(NamedTuple):
    """An operation that runs in a worker.

    Attributes:
        kind: The operation's name.
        task: The task that runs it; cancelling the task abandons the operation.
        outcome: The result for its handler, or the problem that it ended in. Once it is set, the session is idle.
        episode: For a step: the episode that it belongs to.
        step: For a step: its index.
        action: For a step: the action in JSON's encoding.
    """

    kind: str
    task: "asyncio.Task[Any]"
    outcome: "asyncio.Future[Any]"
    episode: int = -1
    step: int = -1
    action: Any = None


class LocalSession(BaseSession):
    """A session whose environment belongs to this process.

    Attributes:
        kwargs: The client's kwargs.
        worker: The worker that holds the environment, under the session's id as key.
        inline: The same worker if it runs inline, so that a step needs no await.
        attached: Whether the worker holds the environment. It does not after a crash or a time-out.
        recoverable: Whether an environment that is not attached can be rebuilt from the journal.
        playing: Whether a step can be taken: an episode has begun, and neither ended nor broke.
        last: The last step.
        resets: The last resets by their request id.
        running: The operation that runs in the worker now.
        journal: How to rebuild the episode.
    """

    __slots__ = (
        "action_space",
        "attached",
        "inline",
        "journal",
        "kwargs",
        "last",
        "observation_space",
        "playing",
        "read_action",
        "recoverable",
        "resets",
        "running",
        "worker",
    )

    def __init__(
        self,
        session_id: str,
        *,
        entry: "CatalogEntry",
        owner: str,
        kwargs: dict[str, Any],
        worker: Worker,
        journal: "Journal",
        idle_timeout_s: float,
        now: float,
    ) -> None:
        super().__init__(session_id, entry=entry, owner=owner, idle_timeout_s=idle_timeout_s, now=now)
        self.kwargs = kwargs
        self.worker = worker
        self.inline = worker if isinstance(worker, InlineWorker) else None
        self.journal = journal
        self.attached = False
        self.recoverable = False
        self.playing = False
        self.last: StepRecord | None = None
        self.resets: OrderedDict[str, ResetRecord] | None = None
        self.running: Running | None = None
        self.take_spaces(entry.action_space, entry.observation_space)

    @property
    def is_busy(self) -> bool:
        """Whether an operation runs in the worker."""
        return self.running is not None

    @property
    def is_playing(self) -> bool:
        """Whether a step can be taken."""
        return self.playing

    def let_go(self, reason: EndReason) -> Coroutine[Any, Any, None] | None:
        """Give a running operation up and close the environment."""
        if self.running is not None:
            self.running.task.cancel()
        # An operation that was cancelled before it began has not changed its environment.
        self.attached = False
        if self.inline is not None:
            self.inline.close_now(self.session_id)
            return None
        return self.worker.close(self.session_id)

    def take_spaces(self, action_space: Space[Any], observation_space: Space[Any]) -> None:
        """Use the spaces of the environment that was made; kwargs may change them."""
        if action_space is self.entry.action_space:
            self.read_action = self.entry.read_action
        else:
            self.read_action = action_reader(action_space)
        self.action_space = action_space
        self.observation_space = observation_space

    def remember_reset(self, request_id: str, record: ResetRecord) -> None:
        """Keep the answer to a reset for the case that its request comes again."""
        if self.resets is None:
            self.resets = OrderedDict()
        self.resets[request_id] = record
        if len(self.resets) > _REMEMBERED_RESETS:
            self.resets.popitem(last=False)

    @property
    def began(self) -> ResetRecord | None:
        """How the episode began, if that is remembered."""
        records = () if self.resets is None else self.resets.values()
        return next((record for record in records if record.episode == self.episode), None)

    def take_step(self, record: StepRecord, terminated: bool, truncated: bool) -> None:
        """Move on by a step that was taken."""
        self.step = record.step + 1
        self.last = record
        self.terminated = terminated
        self.truncated = truncated
        self.playing = not (terminated or truncated)

    def begin_episode(self, record: ResetRecord) -> None:
        """Move on to the episode that a reset began."""
        self.episode = record.episode
        self.seed = record.seed
        self.step = 0
        self.playing = True
        self.terminated = self.truncated = False
        self.attached = True

    def resume(self, episode: int, journal: "Journal", outcome: StepOutcome | None) -> None:
        """Resume from the point that a replay has reached.

        Args:
            episode: Index of the current episode.
            journal: The replayed journal.
            outcome: That of its last step, if there was one.
        """
        self.attached = True
        self.recoverable = False
        self.episode = episode
        self.seed = journal.seed
        self.step = journal.steps
        if outcome is not None:
            seen = encode_value(self.observation_space, outcome.observation, binary=False)
            self.last = StepRecord(self.episode, self.step - 1, journal.actions[-1], outcome, seen)
            self.terminated, self.truncated = bool(outcome.terminated), bool(outcome.truncated)
        self.playing = not (self.terminated or self.truncated)
