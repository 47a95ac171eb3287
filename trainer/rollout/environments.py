"""Connections to the environment servers of a run, sessions that are used again, and notices about dead servers."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Literal, Self

from gymnasium.spaces import Space, Text

from rollgym.clients.client.answers import reading
from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.tasks.task import Task

_UNMENTIONED_S = 2.0
"""A server that is back so soon, such as one that restarts, is not worth a word."""
_FIRST_REMINDER_S = 15.0


class OutageReport:
    """Reports servers that cannot be reached: a live counter in a terminal, elsewhere ever rarer lines.

    Args:
        console: Where notices are printed.
        patience_s: How long to wait for a server.
    """

    def __init__(self, console: RunConsole, patience_s: float) -> None:
        self._console = console
        self._patience_s = patience_s
        self._counting: dict[str, asyncio.Task[None]] = {}

    @property
    def any(self) -> bool:
        """Whether any server is unreachable now."""
        return bool(self._counting)

    def listener(self, address: str, waiting: Callable[[], int]) -> Callable[[Exception | None], None]:
        """Return what a client calls when it loses its server, and when it has it again.

        Args:
            address: The server.
            waiting: Number of episodes that wait for it.
        """
        return partial(self._heard, address, waiting)

    def close(self) -> None:
        """Stop the live counter and its task."""
        for counting in self._counting.values():
            counting.cancel()
        self._counting.clear()

    def _heard(self, address: str, waiting: Callable[[], int], error: Exception | None) -> None:
        before = self._counting.pop(address, None)
        if before is not None:
            before.cancel()
        if error is not None:
            count = self._count(address, waiting, error)
            self._counting[address] = asyncio.get_running_loop().create_task(count)

    async def _count(self, address: str, waiting: Callable[[], int], error: Exception) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        reminder_s = _UNMENTIONED_S
        try:
            while True:
                await asyncio.sleep(1.0)
                gone_s = loop.time() - began
                if gone_s < reminder_s and not self._console.live:
                    continue
                found = f"{address} has not answered for {gone_s:.0f} s, {waiting()} episodes wait"
                then = f"the run is saved and ends after {self._patience_s:.0f} s ({error})"
                if self._console.live:
                    self._console.status(f"{found};\n{then}")
                else:
                    self._console.say(found)
                    self._console.explain(then)
                reminder_s = max(_FIRST_REMINDER_S, 2 * reminder_s)
        finally:
            if self._console.live:
                self._console.status(None)
            if reminder_s > _UNMENTIONED_S:
                self._console.say(f"environment server {address} was gone for {loop.time() - began:.0f} s")


OPERATION_TIMEOUT_S = 600.0
_CLOSING_S = 2.0


class _Server:
    """One server: how many sessions it allows, which of the pool's are idle, and the callers that wait.

    Attributes:
        client: The connection.
        limit: Number of sessions that it allows at one time.
        lent: Number of episodes that play in a session, or wait for one.
        places: Number of sessions that may still be made.
        idle: Idle sessions by key, the key that was used last at the end.
        waiting: The waiting callers, in order: a key, and a future for an idle session of it, or None for a place.
    """

    def __init__(self, client: EnvClient, limit: int) -> None:
        self.client = client
        self.limit = max(1, limit)
        self.lent = 0
        self.places = self.limit
        self.idle: OrderedDict[str, list[EnvSession]] = OrderedDict()
        self.waiting: deque[tuple[str, asyncio.Future[EnvSession | None]]] = deque()

    def take_idle(self, key: str | None = None) -> EnvSession | None:
        """Remove an idle session of a key, or one of the least recently used key."""
        if key is None:
            key = next(iter(self.idle), "")
        sessions = self.idle.get(key)
        if sessions is None:
            return None
        session = sessions.pop()
        if not sessions:
            del self.idle[key]
        return session

    def keep(self, key: str, session: EnvSession) -> None:
        """Return a session to the pool, for the next caller that needs one with its key."""
        self.idle.setdefault(key, []).append(session)
        self.idle.move_to_end(key)

    def next_waiting(self, key: str | None = None) -> asyncio.Future[EnvSession | None] | None:
        """Remove the caller that has waited longest (for a key, if given)."""
        for position, (wanted, future) in enumerate(self.waiting):
            if key in (None, wanted) and not future.cancelled():
                del self.waiting[position]
                return future
        return None


class EnvironmentPool:
    """Clients by URL and idle sessions by (URL, environment, kwargs).

    A server limits the sessions of a token. If the limit is below what is wanted at one time, idle sessions of other
    environments are closed, and episodes wait for their turn.

    Args:
        default_url: Server of the tasks that name none.
        token: Bearer token for all servers.
        encoding: "json" or "msgpack".
        timeout_s: Time limit of one operation, including the client's retries.
        outages: Notified of servers that cannot be reached.
        patience_s: How long to wait for a server that went away.
        connect_s: How long to wait for a server that was never reached.
    """

    def __init__(
        self,
        default_url: str | None,
        token: str | None,
        encoding: Literal["json", "msgpack"],
        timeout_s: float = OPERATION_TIMEOUT_S,
        outages: OutageReport | None = None,
        patience_s: float = 300.0,
        connect_s: float = 15.0,
    ) -> None:
        self._default_url = default_url
        self._token = token
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._outages = outages
        self._patience_s = patience_s
        self._connect_s = connect_s
        self._servers: dict[str, _Server] = {}
        self._connecting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._unreachable = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unreachable = self.disconnected
        if self._outages is not None:
            self._outages.close()
        if kind is None:
            await asyncio.gather(*self._closing, return_exceptions=True)
            await self.shrink()
        else:
            await self._close_what_can_be()
        for server in self._servers.values():
            await server.client.close()
        self._servers.clear()

    async def _close_what_can_be(self) -> None:
        """Close sessions after an error, when the server may be down; its idle time-out ends the others."""
        if not self._unreachable:
            with contextlib.suppress(ProblemError, ConnectionError, TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await asyncio.gather(*self._closing, return_exceptions=True)
                    await self.shrink()
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def client(self, url: str | None) -> EnvClient:
        """Return the client for `url`, connected."""
        return (await self._server(url)).client

    async def places(self, urls: Iterable[str | None]) -> int:
        """Return how many sessions the most frugal of these servers allows."""
        return min([(await self._server(url)).limit for url in set(urls)])

    async def _server(self, url: str | None) -> _Server:
        address = url or self._default_url
        if address is None:
            raise ConfigError("no environment server: pass --env-url, or set 'url' on every task")
        if address not in self._servers:
            async with self._connecting:
                if address not in self._servers:
                    self._servers[address] = await self._connect(address)
        return self._servers[address]

    async def _connect(self, address: str) -> _Server:
        heard = None
        if self._outages is not None:
            heard = self._outages.listener(address, partial(self._lent, address))
        try:
            client = EnvClient(
                address,
                token=self._token,
                encoding=self._encoding,
                timeout_s=max(self._timeout_s, 2 * self._patience_s),
                connect_timeout_s=self._connect_s,
                reconnect_timeout_s=self._patience_s,
                on_outage=heard,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        await client.__aenter__()
        limits = (await client.info()).limits
        with reading("info"):
            return _Server(client, min(limits["max_sessions"], limits["max_sessions_per_token"]))

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[EnvSession]:
        """Lend a session that can play `task`; a session whose episode failed is not used again."""
        server = await self._server(task.url)
        server.lent += 1
        try:
            async with self._lend(server, task) as session:
                yield session
        except ProblemError as error:
            if error.code == "unknown_env":
                error.add_note(f"`roll-env list --url {server.client.url}` shows what that server has")
            raise
        finally:
            server.lent -= 1

    @asynccontextmanager
    async def _lend(self, server: _Server, task: Task) -> AsyncIterator[EnvSession]:
        session = await self._take(server, task)
        healthy = False
        try:
            yield session
            healthy = True
        finally:
            if healthy:
                self._give_back(server, task.session_key, session)
            else:
                self._abandon(server, session)

    @asynccontextmanager
    async def sessions(self, task: Task, wanted: int) -> AsyncIterator[list[EnvSession]]:
        """Lend up to `wanted` sessions of one kind: as many as there are places for, and at least one.

        Idle sessions are closed first.
        """
        await self.shrink()
        async with self.session(task) as first:
            server = await self._server(task.url)
            count = min(wanted - 1, server.places)
            server.places -= count
            more: list[EnvSession] = []
            try:
                if count:
                    more = await server.client.make_many(task.env_id, count, dict(task.kwargs))
                yield [first, *more]
            finally:
                self._abandon(server, *more)
                for _ in range(count - len(more)):
                    _free(server)

    @property
    def disconnected(self) -> bool:
        """Whether a server is unreachable now."""
        return self._outages is not None and self._outages.any

    def backpressure(self) -> dict[str, float]:
        """Return how often servers were overloaded so far, and how long operations have waited for that, if any was."""
        found = [server.client.backpressure for server in self._servers.values()]
        if not any(each.overloaded for each in found):
            return {}
        return {
            "rollout/overloaded": float(sum(each.overloaded for each in found)),
            "rollout/overload_wait_s": sum(each.waited_s for each in found),
        }

    def _lent(self, address: str) -> int:
        return self._servers[address].lent if address in self._servers else 0

    async def shrink(self) -> None:
        """Close all idle sessions, for example after an evaluation that needed many."""
        for server in self._servers.values():
            sessions = [session for each in server.idle.values() for session in each]
            if sessions:
                server.idle.clear()
                await server.client.close_sessions(sessions)
                for _ in sessions:
                    _free(server)

    async def _take(self, server: _Server, task: Task) -> EnvSession:
        """Take an idle session, or make one as soon as there is a place for it."""
        key = task.session_key
        session = server.take_idle(key)
        if session is None and server.places > 0:
            server.places -= 1
        elif session is None:
            future: asyncio.Future[EnvSession | None] = asyncio.get_running_loop().create_future()
            server.waiting.append((key, future))
            unused = server.take_idle()
            if unused is not None:
                self._abandon(server, unused)
            try:
                session = await future
            except asyncio.CancelledError:
                if future.cancelled():
                    server.waiting.remove((key, future))
                else:
                    self._pass_on(server, key, future.result())
                raise
        return session or await self._make(server, task)

    def _give_back(self, server: _Server, key: str, session: EnvSession) -> None:
        """Give a session to a caller that waits for its kind; close it if others wait for a place; else keep it."""
        future = server.next_waiting(key)
        if future is not None:
            future.set_result(session)
        elif server.waiting:
            self._abandon(server, session)
        else:
            server.keep(key, session)

    def _pass_on(self, server: _Server, key: str, session: EnvSession | None) -> None:
        """Give on what came for an episode that was cancelled at that moment."""
        if session is None:
            _free(server)
        else:
            self._give_back(server, key, session)

    def _abandon(self, server: _Server, *sessions: EnvSession) -> None:
        """Close sessions in the background: an operation may hang, and an episode may be cancelled by now."""
        task = asyncio.get_running_loop().create_task(_close_quietly(server, sessions))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _make(self, server: _Server, task: Task) -> EnvSession:
        try:
            session = await server.client.make(task.env_id, dict(task.kwargs))
        except BaseException as error:
            _free(server)
            if isinstance(error, ProblemError) and error.code == "too_large":
                error.add_note(
                    f"shorten the kwargs of {task.env_id}, or raise the server's --max-request-bytes"
                )
            raise
        _require_text(task.env_id, session.action_space)
        return session


async def _close_quietly(server: _Server, sessions: Sequence[EnvSession]) -> None:
    # A session that cannot be closed has ended, or its server has; otherwise the server's idle time-out ends it.
    try:
        with contextlib.suppress(ProblemError, ConnectionError, TimeoutError):
            await server.client.close_sessions(sessions)
    finally:  # others wait for the places, no matter what the server answered
        for _ in sessions:
            _free(server)


def _free(server: _Server) -> None:
    """Note that a session was closed, so that a waiting caller may create one."""
    future = server.next_waiting()
    if future is None:
        server.places += 1
    else:
        future.set_result(None)


def _require_text(env_id: str, space: Space[object]) -> None:
    if not isinstance(space, UnicodeText | Text):
        raise ConfigError(
            f"{env_id} takes {space} actions, but a language model speaks text: serve it through the text adapter, "
            "`roll-serve --gymnasium-text ID` in place of `--gymnasium ID` (roll-env list shows which environments "
            "take text)"
        )
