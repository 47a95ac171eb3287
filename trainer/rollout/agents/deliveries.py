"""Answers that may be lost in transit: a client that retries receives the same answer, and nothing is resampled.

A reply enters the record when it is sampled, whether or not it arrives. OpenAI's clients retry by themselves if a
connection breaks, if a server in between answers 429 or 5xx, or if they have waited too long; a header marks the retry.
Without this module the record would hold a reply that the agent never saw beside the one that it continued with.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request

from rollgym.trainer.rollout.agents.answers import Answer

_RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's libraries count their retries; the first attempt is 0."""
_KEY_HEADER = "idempotency-key"
_REMEMBERED = 64
"""Answers of a session that may be asked for again: clients do it within seconds."""


class Delivery:
    """One answer, and its waiting requests.

    Args:
        asked: Names the request.
        work: Samples the answer.
    """

    def __init__(self, asked: bytes, work: Coroutine[Any, Any, Answer]) -> None:
        self.asked = asked
        self.working = asyncio.get_running_loop().create_task(work)
        self.is_one_of_several = False
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether there is an answer, or there will be one."""
        if not self.working.done():
            return not self.working.cancelling()
        return not self.working.cancelled() and self.working.exception() is None

    async def answer(self) -> Answer:
        """Wait for the answer; cancel it once its last waiter is gone."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.working)
        finally:
            self._waiting -= 1
            if not self._waiting and not self.working.done():
                self.working.cancel()
                await asyncio.wait({self.working})


class Deliveries:
    """The latest answers of a session, by what was asked."""

    def __init__(self) -> None:
        self._latest: deque[Delivery] = deque(maxlen=_REMEMBERED)

    def begin(self, asked: bytes, work: Coroutine[Any, Any, Answer]) -> Delivery:
        """Answer a request that was not asked before."""
        delivery = Delivery(asked, work)
        for other in self._latest:
            if other.asked == asked and not other.working.done():
                other.is_one_of_several = delivery.is_one_of_several = True
        self._latest.append(delivery)
        return delivery

    def again(self, request: Request, asked: bytes) -> Delivery | None:
        """Return the answer that a retried request asks for.

        None if the request is a first attempt, if the attempt before it failed, or if equal requests were in flight at
        the same time, so that the lost answer cannot be identified.
        """
        if not _is_retry(request):
            return None
        # An older answer than that attempt's was asked for by a request of its own, which has had it.
        latest = next((each for each in reversed(self._latest) if each.asked == asked), None)
        if latest is None or not latest.is_wanted or latest.is_one_of_several:
            return None
        return latest


def name_of(request: Request, body: bytes) -> bytes:
    """Return what equal requests have in common, and no others."""
    key = request.headers.get(_KEY_HEADER, "")
    return hashlib.blake2b(f"{request.url.path}\n{key}\n".encode() + body, digest_size=16).digest()


def _is_retry(request: Request) -> bool:
    if _KEY_HEADER in request.headers:
        return True  # a client that names its requests uses each name once
    count = request.headers.get(_RETRY_HEADER, "")
    return count.isascii() and count.isdigit() and int(count[:9]) > 0
