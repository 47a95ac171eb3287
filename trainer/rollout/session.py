"""The interface of a session for players of episodes."""

from collections.abc import Mapping
from typing import Any, Protocol

from gymnasium import Space

from rollgym.clients.client.operation import ResetResult, StepResult
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.messages import EnvInfo


class Session(Protocol):
    """One environment on a server, as players, agents and coroutines of users see it.

    An `EnvSession`, or one whose answers are in the rollout log (`LoggedSession`). Its attributes and methods are those
    of `EnvSession`; its lender creates, closes and rebuilds it.
    """

    @property
    def session_id(self) -> str:
        """The id that the server gave the session."""
        ...

    @property
    def env(self) -> EnvInfo:
        """The server's description of the environment."""
        ...

    @property
    def env_id(self) -> str:
        """The id of the session's environment."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments that the environment was made with."""
        ...

    @property
    def action_space(self) -> Space[Any]:
        """The action space of the environment."""
        ...

    @property
    def observation_space(self) -> Space[Any]:
        """The observation space of the environment."""
        ...

    @property
    def episode(self) -> int:
        """Index of the episode in the session; -1 before the first reset."""
        ...

    @property
    def step_index(self) -> int:
        """Number of steps taken in the episode."""
        ...

    @property
    def seed(self) -> int | None:
        """Seed of the episode; None before the first reset."""
        ...

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begin an episode; see `EnvSession.reset`."""
        ...

    async def step(
        self, action: Any, *, autoreset: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """Take one action; see `EnvSession.step`."""
        ...

    async def render(self, mode: str | None = None) -> Any:
        """Render the environment's state; see `EnvSession.render`."""
        ...

    async def fork(self, count: int = 1, reseed: int | None = None) -> list[EnvSession]:
        """Make independent copies at this point; see `EnvSession.fork`."""
        ...

    async def episode_record(self) -> PortableEpisode:
        """Return the portable episode; see `EnvSession.episode_record`."""
        ...
