"""FrozenLake with OpenReward: HTTP, a step is a tool call answered as an event stream, an episode is a session."""

import os
from typing import Any

os.environ["OPENREWARD_LOG_LEVEL"] = "WARNING"  # by default it writes several lines for each call

from lake import Lake, serve
from openreward.environments import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Move(BaseModel):
    action: str


class LakeEnvironment(Environment):
    def __init__(self, task_spec: dict[str, Any], secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec, secrets or {})
        self._lake = Lake()
        self._board = self._lake.reset(task_spec["seed"])[0]

    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"seed": seed} for seed in range(1024)]

    async def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=self._board)]

    @tool
    async def move(self, params: Move) -> ToolOutput:
        """Walk one cell."""
        board, reward, terminated, truncated, info = self._lake.step(params.action)
        return ToolOutput(
            blocks=[TextBlock(text=board)], metadata=info, reward=reward, finished=terminated or truncated
        )


if __name__ == "__main__":
    serve(Server([LakeEnvironment]).app)
