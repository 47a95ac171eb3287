"""Scoring responses in child processes: in one request if each takes little time.

A request to a child costs more than most verifiers do, so responses that arrive in one turn of the event loop go
together, from all callers. A batch is as large as the verifier has shown to score in a moment, so that steps of the
child's sessions get their turn in between, and so that a time-out is due to one response and not to the size of the
batch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    OperationTimeout,
    Verdict,
    WorkerLost,
)
from rollgym.env_server.workers.child_process import ChildProcess
from rollgym.env_server.workers.wire import dump_request

_PREPARE_TIMEOUT_S = 120.0
_TRIES = 3
_MOMENT_S = 0.004
_MOST_TOGETHER = 64
# A batch that was expected to take a moment but takes this long contains a response that hangs; the others do not wait
# for it.
_TOGETHER_TIMEOUT_S = 1.0
# Weight of the newest measurement if it is shorter than the average; a longer one replaces the average at once.
_NEWEST = 0.2
_SHORTEST_S = 1e-6

_Items = Sequence[Mapping[str, Any]]
_log = logging.getLogger(__name__)


class _Call:
    """The responses of one caller."""

    __slots__ = ("env_id", "items", "left", "scored", "shares", "verdicts")

    def __init__(self, env_id: str, items: _Items) -> None:
        self.env_id = env_id
        self.items = items
        self.scored: list[Verdict] = [{}] * len(items)
        self.left = len(items)
        self.shares: list[_Share] = []
        self.verdicts: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()


class _Share:
    """Responses of one caller or several that go to a child together."""

    __slots__ = ("members", "task")

    def __init__(self, members: Sequence[tuple[_Call, int]]) -> None:
        self.members = members
        self.task: asyncio.Task[list[Verdict]] | None = None


class Scoring:
    """Scores responses in the children of a worker.

    Args:
        pick: Gives the child that takes the next request.
        together: How many requests may be in the children at a time.
    """

    def __init__(self, pick: Callable[[], Awaitable[ChildProcess]], together: int) -> None:
        self._pick = pick
        self._slots = asyncio.Semaphore(together)
        self._seconds: dict[bytes, float] = {}
        self._contents: dict[int, tuple[EnvSource, bytes]] = {}
        self._waiting: dict[tuple[bytes, float | None], list[_Call]] = {}

    async def score(self, source: EnvSource, items: _Items, timeout: float | None) -> list[Verdict]:
        """Score responses, spread over the children.

        Args:
            source: How the verifier is built.
            items: The responses with their tasks.
            timeout: How long each may take.
        """
        if not items:
            return []
        key = self._content(source), timeout
        call = _Call(source.env_id, items)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            asyncio.get_running_loop().call_soon(self._send, key)
        waiting.append(call)
        try:
            return await call.verdicts
        finally:
            if call.left:
                self._leave(call)

    def _content(self, source: EnvSource) -> bytes:
        # An object that is kept with its content keeps its id.
        known = self._contents.get(id(source))
        if known is None:
            known = self._contents[id(source)] = source, dump_request(source)
        return known[1]

    def _send(self, key: tuple[bytes, float | None]) -> None:
        content, timeout = key
        members = [(call, index) for call in self._waiting.pop(key) for index in range(len(call.items))]
        size = self._how_many(content)
        for first in range(0, len(members), size):
            self._begin(content, members[first : first + size], timeout)

    def _begin(self, content: bytes, members: Sequence[tuple[_Call, int]], timeout: float | None) -> None:
        share = _Share(members)
        share.task = asyncio.get_running_loop().create_task(self._score(content, members, timeout))
        share.task.add_done_callback(partial(self._scored, share))
        for call in {id(call): call for call, _ in members}.values():
            call.shares.append(share)

    @staticmethod
    def _scored(share: _Share, task: "asyncio.Task[list[Verdict]]") -> None:
        if task.cancelled():
            for call, _ in share.members:
                call.verdicts.cancel()
            return
        error = task.exception()
        if error is not None:
            for call, _ in share.members:
                if not call.verdicts.done():
                    call.verdicts.set_exception(error)
            return
        # There are none if each is on its way alone.
        for (call, index), verdict in zip(share.members, task.result(), strict=False):
            call.scored[index] = verdict
            call.left -= 1
            if not call.left and not call.verdicts.done():
                call.verdicts.set_result(call.scored)

    @staticmethod
    def _leave(call: _Call) -> None:
        """Remove a caller that has left; cancel responses that no other caller waits for."""
        for share in call.shares:
            if share.task is not None and all(other.verdicts.done() for other, _ in share.members):
                share.task.cancel()

    def _how_many(self, source: bytes) -> int:
        seconds = self._seconds.get(source)
        if seconds is None:
            return 1
        return max(1, min(_MOST_TOGETHER, int(_MOMENT_S / max(seconds, _SHORTEST_S))))

    async def _score(
        self, source: bytes, members: Sequence[tuple[_Call, int]], timeout: float | None
    ) -> list[Verdict]:
        """Score responses; nothing if each of them is on its way alone instead."""
        items = [call.items[index] for call, index in members]
        async with self._slots:
            if len(items) == 1:
                return [await self._score_one(source, members[0], timeout)]
            try:
                limit = _TOGETHER_TIMEOUT_S if timeout is None else min(timeout, _TOGETHER_TIMEOUT_S)
                return await self._ask(source, items, limit)
            except (OperationTimeout, WorkerLost):
                # One of them has taken its child down, or all the time there was; which one, shows when each is alone.
                self._seconds.pop(source, None)
        for member in members:
            if not member[0].verdicts.done():
                self._begin(source, [member], timeout)
        return []

    async def _score_one(self, source: bytes, member: tuple[_Call, int], timeout: float | None) -> Verdict:
        call, index = member
        faults = 0
        for _ in range(_TRIES):
            try:
                return (await self._ask(source, [call.items[index]], timeout))[0]
            except OperationTimeout as error:
                _log.warning("verify of %s: %s", call.env_id, error, extra={"env_id": call.env_id})
                return {"score": 0.0, "outcome": "timeout", "detail": str(error)}
            except WorkerLost as lost:
                faults += lost.at_fault
                if faults > 1:
                    break
        return {"score": 0.0, "outcome": "error", "detail": "the process of the verifier died"}

    async def _ask(self, source: bytes, items: _Items, timeout: float | None) -> list[Verdict]:
        """Have one child score responses; all fail if no child is free, or if the verifier cannot be built."""
        try:
            child = await self._pick()
        except NoWorker as error:
            _log.error("responses are not scored: %s", error)
            return [boundary.error_verdict(error)] * len(items)
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
