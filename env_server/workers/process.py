"""Environments in child processes: a hang or a crash costs that child only, not the server.

Responses are scored in these children, too, many in one request if each takes little time: a request to a child costs
more than most verifiers do, so responses that arrive in one turn of the event loop go together, from all callers. A
batch is as large as the verifier has shown to score in a moment, so that steps of the child's sessions get their turn
in between, and so that a time-out is due to one response and not to the size of the batch.
"""

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.env_server.common.logs import LogFormat
from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import (
    CallingWorker,
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    OperationTimeout,
    Spaces,
    Verdict,
    WorkerLost,
)
from rollgym.env_server.workers.child_process import ChildProcess
from rollgym.env_server.workers.wire import dump_request, read_space

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
_CLOSE_TIMEOUT_S = 10.0
_STOP_GRACE_S = 3.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0
# Enough to keep a child busy, and few enough that steps of its sessions come in between.
_SCORES_PER_CHILD = 2
_KNOWN_SPACES = 256
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


class _Place(NamedTuple):
    """The place of an environment: its child, and its number there."""

    child: ChildProcess
    number: int


class ProcessWorker(CallingWorker):
    """Runs environments in a pool of child processes, many in each.

    A child is started when one is needed, and replaced when it dies. A new environment goes to the child that holds the
    fewest. The operations of one child run one after another.

    Args:
        processes: The largest number of children.
        log_format: How the lines of their logs look.

    Attributes:
        children_lost: Children that ended, by why they did.
    """

    isolation = "process"

    def __init__(self, processes: int, log_format: LogFormat) -> None:
        super().__init__()
        self._log_format = log_format
        self._slots: list[ChildProcess | None] = [None] * processes
        self._places: dict[str, _Place] = {}
        self._keys: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._space = functools.lru_cache(maxsize=_KNOWN_SPACES)(read_space)
        self._scoring = Scoring(self._pick_scorer, _SCORES_PER_CHILD * processes)
        self._room = asyncio.Event()
        self._failed_starts = 0
        self._resume_at: asyncio.TimerHandle | None = None
        self._stopping = False
        self.children_lost: Counter[str] = Counter()

    def pids(self) -> list[int]:
        """The process ids of the children that run."""
        return [child.pid for child in self._children()]

    @property
    def trouble(self) -> str | None:
        """Why no environment can be made: the last child to be started ended before it was ready, and none is there."""
        if self._failed_starts > 0 and not any(child.ready for child in self._children()):
            return "worker processes end before they are ready; the log says more"
        return None

    # -- the pool ------------------------------------------------------------------------------------------------

    def _children(self) -> list[ChildProcess]:
        return [child for child in self._slots if child is not None]

    async def _pick(self, timeout: float | None) -> ChildProcess:
        """The least loaded child, or a new one if all are busy and more are allowed."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    children = self._children()
                    if None in self._slots and all(child.environments or child.load for child in children):
                        started = self._start_child()
                        if started is not None:
                            return started
                    if children:
                        return min(children, key=lambda child: (len(child.environments), child.load))
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise NoWorker("no worker process could be started in time") from None

    def _start_child(self) -> ChildProcess | None:
        """A new child, unless children cannot be started at the moment."""
        if self._stopping or self._resume_at is not None:
            return None
        try:
            child = ChildProcess(self._child_ended, self.times, self._log_format)
        except OSError as error:
            # No memory, no more processes, no more descriptors.
            self.children_lost["start"] += 1
            self._start_failed(f"a worker process cannot be started: {error}")
            return None
        self._slots[self._slots.index(None)] = child
        self._room.set()
        return child

    def _child_ended(self, child: ChildProcess) -> None:
        for number in child.environments:
            key = self._keys.pop(number)
            del self._places[key]
        child.environments.clear()
        self._slots[self._slots.index(child)] = None
        if self._stopping:
            return
        self.children_lost[child.lost_by] += 1
        if child.ready:
            self._failed_starts = 0
            _log.warning("worker process %d ended; a new one takes its place", child.pid)
            self._start_child()
        else:
            self._start_failed(f"worker process {child.pid} ended before it was ready")

    def _start_failed(self, trouble: str) -> None:
        """Wait before the next try: a failed start is likely to fail again."""
        backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**self._failed_starts)
        self._failed_starts += 1
        _log.error("%s; next try in %g s", trouble, backoff)
        if self._resume_at is None:
            self._resume_at = asyncio.get_running_loop().call_later(backoff, self._resume)

    def _resume(self) -> None:
        self._resume_at = None
        self._room.set()
        if not self._children():
            # A server that says it is not ready gets no calls that would start one.
            self._start_child()

    # -- environments --------------------------------------------------------------------------------------------

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Build an environment under a key, in the child that holds the fewest."""
        await self.close(key)
        child = await self._pick(timeout)
        number = next(self._numbers)
        self._places[key] = _Place(child, number)
        self._keys[number] = key
        child.environments.add(number)
        try:
            action, observation = await self._run(key, "make", key, source, kwargs, timeout=timeout)
        except EnvironmentRaised:
            self._forget(key)
            raise
        try:
            return self._space(orjson.dumps(action)), self._space(orjson.dumps(observation))
        except DecodeError as error:
            # No client could read them either.
            await self.close(key)
            raise EnvironmentRaised("DecodeError", str(error)) from error

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in the child's environment."""
        observation, info = await self._run(key, "reset", seed, options, timeout=timeout)
        return observation, info

    async def close(self, key: str) -> None:
        """Let an environment go; its child closes it when it comes to that."""
        place = self._places.get(key)
        if place is None:
            return
        self._forget(key)
        place.child.give_up(place.number)
        place.child.tell("close", (place.number,), timeout=_CLOSE_TIMEOUT_S)

    async def _run(self, key: str, op: str, *arguments: Any, timeout: float | None) -> Any:
        place = self._places.get(key)
        if place is None:
            raise WorkerLost(f"there is no environment under {key}")
        child, number = place
        operation = child.ask(op, (number, *arguments), environment=number, timeout=timeout)
        assert operation.future is not None
        try:
            return await operation.future
        except asyncio.CancelledError:
            if self._places.get(key) is place:
                child.abandon(operation)
                await self.close(key)
            raise

    def _forget(self, key: str) -> None:
        child, number = self._places.pop(key)
        del self._keys[number]
        child.environments.discard(number)

    # -- verifiers -----------------------------------------------------------------------------------------------

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses, spread over the children."""
        return await self._scoring.score(source, items, timeout)

    async def _pick_scorer(self) -> ChildProcess:
        children = self._children()
        if children and None not in self._slots:
            return min(children, key=lambda child: child.load)
        idle = next((child for child in children if not child.load), None)
        return idle or await self._pick(_PREPARE_TIMEOUT_S)

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Let the children close their environments, and end them."""
        self._stopping = True
        if self._resume_at is not None:
            self._resume_at.cancel()
        await asyncio.gather(*(child.stop(_STOP_GRACE_S) for child in self._children()))
