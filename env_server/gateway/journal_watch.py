"""Noticing that the journal which gateways share may be another one than before: it has failed over, say."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollgym.env_server.gateway.journal_entries import JournalAway

SETTLE_S = 4.0
"""Gateways have so long to say what they have answered, before any of them begins a session anew."""

# A channel on which nothing is ever said: who listens learns at once that the connection has ended.
_CHANNEL = "rollgym:watch"
_LISTEN_S = 1.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_BROKEN = (RedisError, OSError, TimeoutError, RuntimeError, JournalAway)

_log = logging.getLogger(__name__)


class JournalWatch:
    """Holds a connection to the journal, and after each new one has the journal told what was answered.

    A replica that takes over may lack the latest steps, and each gateway knows only those that it has answered itself.
    A gateway that rebuilt a session from what the replica has, without the word of the others, would go back in
    silence.

    Args:
        redis: The journal's client.
        mark: Tells the journal what this gateway has answered.
    """

    def __init__(self, redis: Redis, mark: Callable[[], Awaitable[None]]) -> None:
        self._redis = redis
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        self._settled_at = math.inf

    @property
    def settling_s(self) -> float:
        """How much longer other gateways may take to say what they have answered; infinite without a connection."""
        return max(0.0, self._settled_at - self._loop.time())

    async def run(self) -> None:
        """Watch until cancelled."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with self._redis.pubsub() as listening:
                    await listening.subscribe(_CHANNEL)
                    pause = _FIRST_PAUSE_S
                    await self._listen(listening)
            except _BROKEN as error:
                self._settled_at = math.inf
                _log.debug("the shared journal's connection has ended: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    async def _listen(self, listening: Any) -> None:
        while True:
            message = await listening.get_message(timeout=_LISTEN_S)
            # Redis' client makes a broken connection anew by itself, and subscribes again: that is all that is seen.
            if message is not None and message["type"] == "subscribe":
                self._settled_at = self._loop.time() + SETTLE_S
                await self._mark()
