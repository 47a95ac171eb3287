"""The interface of a registered server to a gateway, for all protocols."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gymnasium import Space

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import UpstreamProtocol
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.env_server.catalog.kwargs_rules import NO_KWARGS
from rollgym.env_server.workers.base import EnvironmentRaised, Spaces, StepOutcome, Verdict

LATER = frozenset({429, 503})
"""The statuses of HTTP that say that nothing was done, and may be at another time."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The description of a registered environment; by default, actions and observations are texts.

    Attributes:
        version: Episodes of another version are not restored.
        stateless: Whether it scores single responses.
        description: For lists.
        action_space: Of an environment made without kwargs.
        observation_space: Likewise.
        kwargs_schema: JSON Schema of the kwargs that a client may set.
        max_episode_steps: When it truncates.
        deterministic: Whether seed and actions rebuild the state.
        forkable: Whether a session may be copied.
        immediate: Whether steps are answered at once, so that none has to wait for another.
        metadata: Whatever else it says.
    """

    version: str = "0"
    stateless: bool = False
    description: str = ""
    action_space: Space[Any] = field(default_factory=UnicodeText)
    observation_space: Space[Any] = field(default_factory=UnicodeText)
    kwargs_schema: Mapping[str, Any] = field(default_factory=lambda: NO_KWARGS)
    max_episode_steps: int | None = None
    deterministic: bool = False
    forkable: bool = False
    immediate: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class UpstreamError(Exception):
    """A registered server failed: it cannot be reached, or its answer is too large or invalid.

    Args:
        message: A sentence about the failure.
        away: Whether it could not be reached.
        unsent: Whether it certainly has not begun the operation.
    """

    def __init__(self, message: str, *, away: bool = False, unsent: bool = False) -> None:
        super().__init__(message)
        self.away = away
        self.unsent = unsent


class SessionUnknownError(UpstreamError):
    """The server does not have the session any more."""


class Upstream(ABC):
    """A registered environment on another server. Sessions are under keys that the gateway chose.

    Every call may raise `UpstreamError`; those that run the environment also raise `EnvironmentRaised`, if the server
    reports a failure of the environment, and `OperationTimeout`.

    Attributes:
        protocol: The protocol's name.
        keeps_sessions: Whether the server keeps a session after a failed call.
        ends_with_its_calls: Whether a cancelled call leaves nothing at the server.
    """

    protocol: ClassVar[UpstreamProtocol]
    keeps_sessions: ClassVar[bool] = False
    ends_with_its_calls: ClassVar[bool] = False

    @abstractmethod
    async def spec(self) -> EnvironmentSpec:
        """Request the server's description of the environment."""

    async def acquaint(self) -> str | None:
        """A sentence about the connections to the server, at the end of a probe; None if there is none."""
        return None

    @abstractmethod
    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Make a session; return its spaces.

        Raises:
            ProblemError: `at_capacity`, if the server has no room at present.
        """

    @abstractmethod
    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode; return the observation and the info."""

    @abstractmethod
    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the server's session."""

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render the state, if the protocol supports that."""
        raise EnvironmentRaised("NotImplementedError", f"the protocol {self.protocol} has no render")

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for the environment's random generator in mid-episode, if the protocol supports that."""
        raise ProblemError("fork_unsupported", "copies of this environment cannot be seeded anew")

    async def verify(self, items: Sequence[Mapping[str, Any]], *, timeout: float | None) -> list[Verdict]:
        """Score responses, in their order, if the protocol supports that."""
        raise EnvironmentRaised("NotImplementedError", f"the protocol {self.protocol} has no verify")

    @abstractmethod
    async def close(self, key: str) -> None:
        """End a session; ending one that does not exist is not an error."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Close all connections to the server."""
