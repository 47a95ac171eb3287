"""Scoring responses in child processes: several in one request where each takes little time.

A response by itself costs a request to a child more than most verifiers cost. How many go together is what a verifier
has shown to do in a moment, so that steps of a child's sessions come in between, and so that what takes too long is one
response and not their number.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from env_server.workers import boundary
from env_server.workers.base import EnvironmentRaised, EnvSource, OperationTimeout, Verdict, WorkerLost
from env_server.workers.child_process import ChildProcess
from env_server.workers.wire import dump_request

_PREPARE_TIMEOUT_S = 120.0
_TRIES = 3
_MOMENT_S = 0.004
_MOST_TOGETHER = 64
# Weight of the newest measurement where it is shorter than those before; a longer one counts at once.
_NEWEST = 0.2
_SHORTEST_S = 1e-6

_Items = Sequence[Mapping[str, Any]]


class Scoring:
    """Scores responses in the children of a worker.

    Args:
        pick: Gives the child that takes the next request.
        together: How many requests may be in the children at a time.
    """

    def __init__(self, pick: Callable[[], Awaitable[ChildProcess]], together: int) -> None:
        self._pick = pick
        self._places = asyncio.Semaphore(together)
        self._seconds: dict[bytes, float] = {}

    async def score(self, source: EnvSource, items: _Items, timeout: float | None) -> list[Verdict]:
        """Score responses, spread over the children.

        Args:
            source: How the verifier is built.
            items: The responses with their tasks.
            timeout: How long each may take.
        """
        content = dump_request(source)
        size = self._how_many(content)
        shares = (items[first : first + size] for first in range(0, len(items), size))
        scored = await asyncio.gather(*(self._score(content, share, timeout) for share in shares))
        return [verdict for verdicts in scored for verdict in verdicts]

    def _how_many(self, source: bytes) -> int:
        seconds = self._seconds.get(source)
        if seconds is None:
            return 1
        return max(1, min(_MOST_TOGETHER, int(_MOMENT_S / max(seconds, _SHORTEST_S))))

    async def _score(self, source: bytes, items: _Items, timeout: float | None) -> list[Verdict]:
        async with self._places:
            if len(items) == 1:
                return [await self._score_one(source, items[0], timeout)]
            try:
                return await self._ask(source, items, timeout)
            except (OperationTimeout, WorkerLost):
                # One of them has taken its child down, or all the time there was; which one, shows when each is alone.
                self._seconds.pop(source, None)
        alone = await asyncio.gather(*(self._score(source, [item], timeout) for item in items))
        return [verdict for (verdict,) in alone]

    async def _score_one(self, source: bytes, item: Mapping[str, Any], timeout: float | None) -> Verdict:
        faults = 0
        for _ in range(_TRIES):
            try:
                return (await self._ask(source, [item], timeout))[0]
            except OperationTimeout as error:
                return {"score": 0.0, "outcome": "timeout", "detail": str(error)}
            except WorkerLost as lost:
                faults += lost.at_fault
                if faults > 1:
                    break
        return {"score": 0.0, "outcome": "error", "detail": "the process of the verifier died"}

    async def _ask(self, source: bytes, items: _Items, timeout: float | None) -> list[Verdict]:
        """Have one child score responses; a verifier that cannot be built fails on all of them."""
        child = await self._pick()
        if source not in child.prepared:
            child.prepared.add(source)
            child.tell("prepare", (source,), timeout=_PREPARE_TIMEOUT_S)
        operation = child.ask("score", (source, items), timeout=timeout)
        assert operation.future is not None
        try:
            verdicts, seconds = await operation.future
        except EnvironmentRaised as error:
            return [boundary.error_verdict(error)] * len(items)
        except asyncio.CancelledError:
            child.abandon(operation)
            raise
        each = seconds / len(items)
        before = self._seconds.get(source, each)
        self._seconds[source] = each if each > before else before + _NEWEST * (each - before)
        return list(verdicts)
