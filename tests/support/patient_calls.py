"""Callers that bear what a server that is killed does to them, and that know what it should have answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import websockets

from tests.support.client_server import ServerProcess
from tests.support.fragile_envs import undisturbed
from tests.support.wire import Socket


class Caller:
    """Calls over HTTP, and calls again while nobody answers, as every client does.

    Each call has a connection of its own, so that any of the server's processes may be the one that takes it.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def call(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        async with asyncio.timeout(120):
            while True:
                try:
                    answer = await self._client.request(method, path, json=fields or None)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                    continue
                content = answer.json() if answer.content else {}
                if content.get("code") != "draining":
                    return content
                assert content["retry_after"] > 0
                await asyncio.sleep(0.05)

    async def begin(self, env_id: str, owner: int = 0, **fields: Any) -> "Player":
        """A session that is owned by one of the processes and has been reset."""
        while True:
            made = await self.call("POST", "/v1/sessions", env_id=env_id, **fields)
            if made["session_id"].startswith(f"{owner}."):
                break
            await self.call("DELETE", f"/v1/sessions/{made['session_id']}")
        player = Player(self, made["session_id"])
        player.replies.append(await player.ask("reset", seed=1))
        return player

    async def sessions(self) -> int:
        return (await self.call("GET", "/v1/info"))["capacity"]["sessions"]


class Player:
    """A session and all that it has answered."""

    def __init__(self, caller: Caller, session_id: str) -> None:
        self.caller = caller
        self.session_id = session_id
        self.actions: list[str] = []
        self.replies: list[dict[str, Any]] = []

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return await self.caller.call("POST", f"/v1/sessions/{self.session_id}/{op}", **fields)

    async def look(self, what: str = "") -> dict[str, Any]:
        return await self.caller.call("GET", f"/v1/sessions/{self.session_id}{what}")

    async def step(self, action: str, **fields: Any) -> dict[str, Any]:
        reply = await self.ask("step", action=action, step=len(self.actions), **fields)
        self.actions.append(action)
        self.replies.append(reply)
        return reply

    async def again(self) -> dict[str, Any]:
        """The last step once more."""
        return await self.ask("step", action=self.actions[-1], step=len(self.actions) - 1)

    async def gone(self) -> str:
        """Why the session is gone; it stays so."""
        answers = [await self.ask("step", action="on", step=len(self.actions)) for _ in range(2)]
        answers.append(await self.look())
        assert {answer["code"] for answer in answers} == {"session_gone"}, answers
        [reason] = {answer["reason"] for answer in answers}
        return reason

    def check(self, **fields: Any) -> None:
        """All answers are those of a session to which nothing happened."""
        assert self.replies == undisturbed(self.actions, **fields)


@asynccontextmanager
async def calls(server: ServerProcess) -> AsyncIterator[Caller]:
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, limits=alone, timeout=30) as client:
        yield Caller(client)


@asynccontextmanager
async def open_socket(server: ServerProcess) -> AsyncIterator[Socket]:
    url = f"ws://127.0.0.1:{server.port}/v1/ws"
    async with websockets.connect(url, compression=None) as connection:
        yield Socket(connection, binary=False)
