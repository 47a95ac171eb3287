"""FrozenLake with Aviary's dataset server: HTTP, the environment's id in the body."""

from aviary.dataset_server import TaskDatasetServer
from aviary.env import Environment, TaskDataset
from aviary.message import Message
from aviary.tools import Tool
from lake import Lake, serve


class LakeEnvironment(Environment[None]):
    """The action is a plain message: a tool call would cost more."""

    def __init__(self, seed: int) -> None:
        self.tools: list[Tool] = []
        self._seed = seed
        self._lake = Lake()

    async def reset(self) -> tuple[list[Message], list[Tool]]:
        board, info = self._lake.reset(self._seed)
        return [Message(content=board, info=info)], self.tools

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool]:
        board, reward, terminated, truncated, info = self._lake.step(action.content or "")
        return [Message(content=board, info=info)], reward, terminated, truncated


class LakeDataset(TaskDataset[LakeEnvironment]):
    def get_new_env_by_idx(self, idx: int) -> LakeEnvironment:
        return LakeEnvironment(idx)


if __name__ == "__main__":
    serve(TaskDatasetServer(LakeDataset()).app)
