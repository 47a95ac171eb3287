"""A session of a fragile environment, and whether anything has happened to it."""

from typing import Any

from tests.support.fragile_envs import undisturbed
from tests.support.wire import Socket


class Player:
    """A session and all that it has answered."""

    def __init__(self, socket: Socket, session_id: str, begun: dict[str, Any]) -> None:
        self.socket = socket
        self.session_id = session_id
        self.actions: list[str] = []
        self.replies = [begun]

    @classmethod
    async def begin(cls, socket: Socket, env_id: str = "Fragile", **fields: Any) -> "Player":
        made = await socket.call("make", env_id=env_id, **fields)
        begun = await socket.call("reset", session_id=made["session_id"], seed=1)
        return cls(socket, made["session_id"], begun)

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return await self.socket.ask(op, session_id=self.session_id, **fields)

    async def send(self, action: str, **fields: Any) -> int:
        return await self.socket.send(
            "step", session_id=self.session_id, action=action, step=len(self.actions), **fields
        )

    async def take(self, number: int, action: str) -> None:
        """Wait for a step that is to be a good one."""
        answer = await self.socket.answer(number)
        assert "ok" in answer, answer
        self.actions.append(action)
        self.replies.append(answer["ok"])

    async def step(self, action: str) -> None:
        await self.take(await self.send(action), action)

    async def fails(self, action: str, **fields: Any) -> dict[str, Any]:
        answer = await self.socket.answer(await self.send(action, **fields))
        return answer["error"]

    def check(self) -> None:
        """All answers are those of a session to which nothing happened."""
        assert self.replies == undisturbed(self.actions)

    async def check_begins_anew(self) -> None:
        """The session can be reset, and is as good as new."""
        assert (await self.ask("step", action="on"))["error"]["code"] == "not_reset"
        begun = (await self.ask("reset", seed=1))["ok"]
        assert begun["episode"] == 1
        self.actions.clear()
        self.replies = [{**begun, "episode": 0}]
        for action in ("a", "b"):
            answer = await self.ask("step", action=action)
            self.actions.append(action)
            self.replies.append({**answer["ok"], "episode": 0})
        self.check()
