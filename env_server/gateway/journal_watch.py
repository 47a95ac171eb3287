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
"""Seconds for gateways to report the steps that they have answered, before any of them rebuilds a session."""

# A channel without messages: its subscriber learns at once that the connection has ended.
_CHANNEL = "rollgym:watch"
_LISTEN_S = 1.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_BROKEN = (RedisError, OSError, TimeoutError, RuntimeError, JournalAway)

_log = logging.getLogger(__name__)


class JournalWatch:
    """Holds a connection to the journal, and after each reconnect reports the answered steps to it.

    A replica that takes over may lack the latest steps, and each gateway knows only those that it has answered itself.
    A gateway that rebuilt a session from the replica's data alone, without the reports of the others, would silently
    lose steps.

    Args:
        redis: The journal's client.
        mark: Reports the steps that this gateway has answered to the journal.
    """

    def __init__(self, redis: Redis, mark: Callable[[], Awaitable[None]]) -> None:
        self._redis = redis
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        self._settled_at = math.inf

    @property
    def settling_s(self) -> float:
        """How many seconds other gateways still have to report their answered steps; infinite without a connection."""
        return max(0.0, self._settled_at - self._loop.time())

    async def run(self) -> None:
        """Watch the journal until cancelled."""
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
            # Redis' client reconnects by itself and subscribes again: the new subscription is the only sign.
            if message is not None and message["type"] == "subscribe":
                self._settled_at = self._loop.time() + SETTLE_S
                await self._mark()
