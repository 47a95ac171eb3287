"""FrozenLake with OpenEnv: a WebSocket is a session. `--async` overrides the coroutines, which spares threads."""

import sys
from typing import Any

from lake import Lake, serve
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class LakeAction(Action):
    action: str


class LakeObservation(Observation):
    # A field of its own: `metadata` would be sent twice.
    board: str
    info: dict[str, Any] = Field(default_factory=dict)


class LakeEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._lake = Lake()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> LakeObservation:
        board, info = self._lake.reset(seed)
        return LakeObservation(board=board, info=info)

    def step(self, action: LakeAction, timeout_s: float | None = None, **_: Any) -> LakeObservation:
        board, reward, terminated, truncated, info = self._lake.step(action.action)
        return LakeObservation(board=board, info=info, reward=reward, done=terminated or truncated)

    @property
    def state(self) -> State:
        return State()


class AsyncLakeEnvironment(LakeEnvironment):
    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> LakeObservation:
        return self.reset(seed)

    async def step_async(
        self, action: LakeAction, timeout_s: float | None = None, **_: Any
    ) -> LakeObservation:
        return self.step(action)


if __name__ == "__main__":
    served = AsyncLakeEnvironment if "--async" in sys.argv else LakeEnvironment
    serve(create_app(served, LakeAction, LakeObservation, max_concurrent_envs=100_000))
