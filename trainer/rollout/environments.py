"""Connections to the environment servers of a run, and sessions that are used again."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Literal, Self

from gymnasium.spaces import Space

from clients.client import EnvClient
from clients.protocol.errors import ProblemError
from clients.protocol.spaces import UnicodeText
from clients.session import EnvSession
from trainer.tasks.task import Task

OPERATION_TIMEOUT_S = 600.0


class EnvironmentPool:
    """Clients by URL and idle sessions by (URL, environment, kwargs).

    Args:
        default_url: Server of the tasks that name none.
        token: Bearer token for all servers.
        encoding: "json" or "msgpack".
        timeout_s: How long one operation may take, with all that clients do to have it answered.
    """

    def __init__(
        self,
        default_url: str | None,
        token: str | None,
        encoding: Literal["json", "msgpack"],
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        self._default_url = default_url
        self._token = token
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._clients: dict[str, EnvClient] = {}
        self._idle: defaultdict[str, list[EnvSession]] = defaultdict(list)
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)
        if kind is None:
            # After an error the server may be gone; its idle time-out then does what we cannot.
            await self.shrink()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        self._idle.clear()

    async def client(self, url: str | None) -> EnvClient:
        """Return the client for `url`, connected."""
        address = url or self._default_url
        if address is None:
            raise ValueError("no environment server: pass --env-url, or set 'url' on every task")
        if address not in self._clients:
            client = EnvClient(address, token=self._token, encoding=self._encoding, timeout_s=self._timeout_s)
            await client.__aenter__()
            self._clients[address] = client
        return self._clients[address]

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[EnvSession]:
        """Lend a session that can play `task`; a session whose episode failed is not used again."""
        idle = self._idle[task.session_key]
        session = idle.pop() if idle else await self._make(task)
        healthy = False
        try:
            yield session
            healthy = True
        finally:
            if healthy:
                idle.append(session)
            else:
                self._abandon(session)

    async def shrink(self) -> None:
        """Close all idle sessions, for example after an evaluation that needed many."""
        for key, sessions in self._idle.items():
            if sessions:
                client = await self.client(json.loads(key)[0])
                await client.close_sessions(sessions)
                sessions.clear()

    def _abandon(self, session: EnvSession) -> None:
        """Close a session in the background: its operation may hang, and its episode may be cancelled by now."""
        task = asyncio.get_running_loop().create_task(_close_quietly(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _make(self, task: Task) -> EnvSession:
        client = await self.client(task.url)
        session = await client.make(task.env_id, dict(task.kwargs))
        _require_text(task.env_id, session.action_space)
        return session


async def _close_quietly(session: EnvSession) -> None:
    # A session that cannot be closed is gone, or its server is; either way the server's idle time-out has it.
    with contextlib.suppress(ProblemError, ConnectionError, TimeoutError):
        await session.close()


def _require_text(env_id: str, space: Space[object]) -> None:
    if not isinstance(space, UnicodeText):
        raise ValueError(
            f"{env_id} takes {space} actions, but a language model speaks text: serve it through the text adapter, "
            "`roll-serve --gymnasium-text ID` in place of `--gymnasium ID` (roll-env list shows which environments "
            "take text)"
        )
