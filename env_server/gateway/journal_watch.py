"""Watching the journal of several gateways: it may be another one than before, after a fail-over."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollgym.env_server.gateway.journal_entries import JournalAway
from rollgym.env_server.gateway.journal_server import ANSWER_S, FIRST_PAUSE_S, MAX_PAUSE_S, trouble_of

SETTLE_S = 4.0
"""Seconds for gateways to report the steps that they have answered, before any of them rebuilds a session."""

# The script has it, too. Its messages are sessions that have ended, and a subscriber learns at once that its connection
# has.
_CHANNEL = "rollgym:watch"
_LISTEN_S = 1.0
# For a message, a new connection included.
_HEAR_S = _LISTEN_S + 2 * ANSWER_S
_NOT_WATCHED = (RedisError, OSError, TimeoutError, RuntimeError, JournalAway)

_log = logging.getLogger(__name__)


class JournalWatch:
    """Holds a connection to the journal, and after each reconnect reports the answered steps to it.

    Over this connection, a gateway hears of sessions that end at other gateways. What it did not hear while it had no
    connection, the journal answers to its report.

    A replica that takes over may lack the latest steps, and each gateway knows only those that it has answered itself.
    A gateway that rebuilt a session from the replica's data alone, without the reports of the others, would silently
    lose steps.

    Args:
        redis: The journal's client.
        mark: Reports the steps that this gateway has answered to the journal.
        hear: Takes the messages of its connection.
    """

    def __init__(
        self, redis: Redis, mark: Callable[[], Awaitable[None]], hear: Callable[[bytes], None]
    ) -> None:
        self._redis = redis
        self._mark = mark
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._settled_at = math.inf
        self._pause_s = FIRST_PAUSE_S

    @property
    def settling_s(self) -> float:
        """How many seconds other gateways still have to report their answered steps; infinite without a connection."""
        return max(0.0, self._settled_at - self._loop.time())

    async def run(self) -> None:
        """Watch the journal until cancelled."""
        while True:
            try:
                async with self._redis.pubsub() as listening:
                    async with asyncio.timeout(ANSWER_S):
                        await listening.subscribe(_CHANNEL)
                    await self._listen(listening)
            except _NOT_WATCHED as error:
                self._settled_at = math.inf
                _log.debug("the shared journal's connection has ended: %s", trouble_of(error))
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    async def _listen(self, listening: Any) -> None:
        while True:
            async with asyncio.timeout(_HEAR_S):
                message = await listening.get_message(timeout=_LISTEN_S)
            # Redis' client reconnects by itself and subscribes again: the new subscription is the only sign.
            if message is not None and message["type"] == "subscribe":
                self._settled_at = self._loop.time() + SETTLE_S
                await self._mark()
                # Not before: a journal that can be connected to and not written to may stay so for long.
                self._pause_s = FIRST_PAUSE_S
            elif message is not None and message["type"] == "message":
                self._hear(message["data"])
