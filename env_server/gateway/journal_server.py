"""The server that has the journal of several gateways: the script that runs there, and whether it can be used."""

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from rollgym.env_server.common.metrics import Durations
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.journal_entries import JournalAway

PREFIX = "rollgym:session:"
"""The keys of sessions there begin with it."""

ANSWER_S = 2.0
"""A gateway that gets no answer in this time reports that to its client, which retries."""

FIRST_PAUSE_S = 0.05
"""The pause before the first reconnect; each further one is twice as long."""

MAX_PAUSE_S = 1.0
"""The longest of these pauses."""

_TRIAL = "rollgym:trial"
_SCRIPT = "shared_journal.lua"
# How much of that replicas may take to confirm a write.
_CONFIRM_S = 1.0
# One of them is the watch's.
_CONNECTIONS = 9
_log = logging.getLogger(__name__)


class UnconfirmedWriteError(Exception):
    """Fewer replicas than required have confirmed a write in time: a fail-over to another one would lose it."""


# uvloop raises RuntimeError on a write to a closed transport.
_BROKEN = (RedisError, OSError, TimeoutError, RuntimeError, UnconfirmedWriteError)


class JournalServer:
    """Redis, or a server of the same protocol, to which one gateway's calls go.

    No call waits for longer than a few seconds; while the server is known to be away, only reconnects are tried.

    Args:
        url: Its address: `redis://`, `rediss://` or `unix://`.
        replicas: How many replicas must confirm each write.

    Attributes:
        redis: Its client.
        calls: Calls, by command and outcome; see `SharedJournal.calls`.
        call_seconds: The durations of answered calls, by command.
        sent_bytes: Bytes of the records in them.

    Raises:
        ConfigurationError: The URL is invalid.
    """

    def __init__(self, url: str, replicas: int) -> None:
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=ANSWER_S,
                # Each use of the client has a time-out of its own here. Under this one, the client sends by means of
                # asyncio.wait_for, which before Python 3.12 loses a cancellation that comes once the command is sent.
                socket_timeout=None,
                socket_connect_timeout=ANSWER_S,
                # For connections that were idle while the server restarted; each command may be repeated.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        except ValueError as error:
            raise ConfigurationError(f"journal_url cannot be read: {error}") from error
        self.redis = Redis(connection_pool=pool)
        self._replicas = replicas
        self._script = files("rollgym.env_server.gateway").joinpath(_SCRIPT).read_text("utf-8")
        self._digest = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._loop = asyncio.get_running_loop()
        self._reaching: asyncio.Task[None] | None = None
        self._trouble: str | None = "it was not reached yet"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.call_seconds: defaultdict[str, Durations] = defaultdict(Durations)
        self.sent_bytes = 0

    @property
    def trouble(self) -> str | None:
        """Why the server cannot be used at present, if it cannot."""
        return self._trouble

    async def start(self) -> None:
        """Connect; if the server is away, keep trying in the background."""
        try:
            await self._look()
        except JournalAway as away:
            _log.error("the shared journal cannot be used yet: %s", away)
            return
        await self._warn()

    async def close(self) -> None:
        """Disconnect."""
        if self._reaching is not None:
            self._reaching.cancel()
        await self.redis.aclose()

    async def run(self, command: str, session_ids: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run the script.

        Raises:
            JournalAway: It did not answer that it was done.
        """
        if self._trouble is not None:
            raise JournalAway(self._trouble)
        keys = [PREFIX + session_id for session_id in session_ids]
        self.sent_bytes += sum(len(each) for each in arguments if type(each) is bytes)
        began = time.perf_counter()
        try:
            answer = await self._evaluate(command, keys, arguments)
        except _BROKEN as error:
            outcome = "unconfirmed" if isinstance(error, UnconfirmedWriteError) else "away"
            self.calls[command, outcome] += 1
            self._lost(trouble_of(error))
            raise JournalAway(self._trouble or "it does not answer") from error
        self.calls[command, "ok"] += 1
        self.call_seconds[command].add(time.perf_counter() - began)
        return answer

    async def _evaluate(self, command: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        words = "EVALSHA", self._digest, len(keys), *keys, command, *arguments
        try:
            return await self._execute(*words)
        except NoScriptError:
            # Redis has restarted, or this is the first call.
            async with asyncio.timeout(ANSWER_S):
                await self.redis.script_load(self._script)
            return await self._execute(*words)

    async def _execute(self, *words: Any) -> Any:
        """Execute a command, and wait until enough replicas have what was written by it or before it.

        Raises:
            UnconfirmedWriteError: Too few replicas have confirmed it in time.
        """
        execute: Callable[..., Awaitable[Any]] = self.redis.execute_command
        if not self._replicas:
            async with asyncio.timeout(ANSWER_S):
                return await execute(*words)
        # WAIT waits for the writes of its own connection.
        async with asyncio.timeout(ANSWER_S), self.redis.pipeline(transaction=False) as both:
            both.execute_command(*words)
            both.execute_command("WAIT", self._replicas, milliseconds(_CONFIRM_S))
            answer, confirmed = await both.execute(raise_on_error=False)
        for each in (answer, confirmed):
            if isinstance(each, Exception):
                raise each
        if confirmed < self._replicas:
            raise UnconfirmedWriteError(
                f"{confirmed} of {self._replicas} replicas (journal_replicas) confirmed a write within {_CONFIRM_S:g} s"
            )
        return answer

    def _lost(self, trouble: str) -> None:
        if self._trouble is None:
            _log.error("the shared journal cannot be used: %s", trouble)
        self._trouble = trouble
        if self._reaching is None:
            self._reaching = self._loop.create_task(self._reach())

    async def _reach(self) -> None:
        """Try until the journal can be written to again."""
        pause = FIRST_PAUSE_S
        try:
            while self._trouble is not None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
                try:
                    await self._try()
                except JournalAway as away:
                    self._trouble = str(away)
            _log.warning("the shared journal can be used again")
        finally:
            self._reaching = None

    async def _look(self) -> None:
        try:
            await self._try()
        except JournalAway as away:
            self._lost(str(away))
            raise

    async def _try(self) -> None:
        try:
            await self._evaluate("try", [_TRIAL], [])
        except _BROKEN as error:
            raise JournalAway(trouble_of(error)) from error
        self._trouble = None

    async def _warn(self) -> None:
        """Warn the operator of settings under which acknowledged writes may be lost."""
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self.redis.info("memory", "persistence")
        except _BROKEN:
            # Not every user may read that setting.
            return
        policy = found.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            _log.warning(
                "the shared journal may evict sessions: set maxmemory-policy noeviction, not %s", policy
            )
        if not found.get("aof_enabled", 1):
            _log.warning("the shared journal does not outlive its server: set appendonly yes")


def trouble_of(error: Exception) -> str:
    """Why the server cannot be used."""
    # asyncio's time-outs have no text.
    return str(error) or f"no answer came within {ANSWER_S:g} s"


def milliseconds(seconds: float) -> int:
    """A time as the script takes it: at least one."""
    return max(1, int(1000 * seconds))
