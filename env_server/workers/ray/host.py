"""The code that runs in a Ray actor: the child processes of one node, and the calls that reach them.

Code of environments runs in the children and never in the actor itself. If an environment hangs while it holds the
interpreter lock, exits, or exhausts its memory, the actor can still report the operation; and Ray never deserializes an
environment's objects, which would run code. The children end when the actor does, however it dies.

A call has several operations and a reply several answers. As between an I/O process and its children, replies may
contain only plain data and arrays.
"""

import asyncio
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollgym.clients.protocol.spaces import describe_space
from rollgym.env_server.workers.base import EnvironmentRaised, EnvSource, OperationTimeout, WorkerLost
from rollgym.env_server.workers.process import ProcessWorker
from rollgym.env_server.workers.wire import (
    RAISED,
    RESULT,
    FrameSplitter,
    dump_request,
    dump_result,
    frame,
    load_request,
    load_result,
)

TIMED_OUT = 3
"""The operation took too long; the body holds the message."""
LOST = 4
"""The environment is gone; the body holds the message, and whether the operation is to blame."""

UNANSWERED = 0
"""The number of operations whose result is discarded."""

Failure = EnvironmentRaised | OperationTimeout | WorkerLost
# A call costs as much as dozens of steps, so that answers wait this long for others that may come at once.
_GATHER_S = 0.001
# Calls that wait for answers here. One more lets the oldest return, so that there is always room for requests.
_PARKED_CALLS = 2


class ActorRequest(NamedTuple):
    """An operation that is sent to an actor.

    Attributes:
        number: The number of its answer, or `UNANSWERED`.
        op: A method of a worker, or `cancel`.
        arguments: The arguments of the call.
        timeout: The time-out of the operation, in seconds.
    """

    number: int
    op: str
    arguments: tuple[Any, ...]
    timeout: float | None


class ActorAnswer(NamedTuple):
    """The result of an operation."""

    number: int
    result: Any
    failure: Failure | None


def dump_requests(requests: Iterable[ActorRequest]) -> bytes:
    """Write requests. They are an I/O process's own."""
    return dump_request([tuple(request) for request in requests])


def load_requests(body: bytes) -> Iterator[ActorRequest]:
    """Read requests, in their order."""
    return map(ActorRequest._make, load_request(body))


def dump_answer(number: int, result: Any) -> bytes:
    """Write a result. It came from a child process, so that it is plain data."""
    return frame(number, RESULT, dump_result(result))


def dump_failure(number: int, failure: Failure) -> bytes:
    """Encode why an operation has no result."""
    if isinstance(failure, EnvironmentRaised):
        return frame(
            number, RAISED, dump_result((failure.error_class, failure.message, failure.builtin_bases))
        )
    if isinstance(failure, OperationTimeout):
        return frame(number, TIMED_OUT, dump_result((str(failure),)))
    return frame(number, LOST, dump_result((str(failure), failure.at_fault)))


def load_answers(body: bytes) -> Iterator[ActorAnswer]:
    """Read the answers of one reply."""
    for number, status, content in FrameSplitter().feed(body):
        try:
            read = load_result(content)
        except pickle.UnpicklingError as error:
            yield ActorAnswer(number, None, EnvironmentRaised("TypeError", str(error)))
            continue
        if status == RESULT:
            yield ActorAnswer(number, read, None)
        else:
            yield ActorAnswer(number, None, _failure(status, read))


def _failure(status: int, content: tuple[Any, ...]) -> Failure:
    if status == RAISED:
        return EnvironmentRaised(*content)
    if status == TIMED_OUT:
        return OperationTimeout(*content)
    message, at_fault = content
    return WorkerLost(message, at_fault=at_fault)


class ActorHost:
    """Runs operations in child processes of this node, for one I/O process.

    An I/O process keeps at least one call of `exchange` in flight here, which returns when there are results.

    Args:
        processes: How many child processes.
        path: The import path of the I/O process; its entries that exist here, and are not on the path yet, are
            appended.
    """

    def __init__(self, processes: int, path: Sequence[str]) -> None:
        # Output of environments goes to the server's log; standard output is reserved for the ready line.
        os.dup2(2, 1)
        sys.path.extend(each for each in path if each not in sys.path and os.path.exists(each))
        self._worker = ProcessWorker(processes, "text")
        self._running: dict[int, asyncio.Task[None]] = {}
        self._untold: set[asyncio.Task[None]] = set()
        self._answers: list[bytes] = []
        self._parked: deque[asyncio.Future[bytes]] = deque()
        self._gathering: asyncio.TimerHandle | None = None
        self._operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "make": self._make,
            "reset": self._worker.reset,
            "step": self._worker.step,
            "render": self._worker.render,
            "reseed": self._worker.reseed,
            "verify": self._worker.verify,
            "close": self._close,
        }

    async def hello(self) -> str:
        """Report that the actor has started, and on which host."""
        return f"{socket.gethostname()} (process {os.getpid()})"

    async def exchange(self, requests: bytes) -> bytes:
        """Begin operations, and wait for answers to these or to earlier ones."""
        for request in load_requests(requests):
            self._begin(request)
        if len(self._parked) == _PARKED_CALLS:
            self._reply()
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parked.append(waiting)
        self._reply_soon()
        return await waiting

    async def stop(self) -> None:
        """Close the environments, and end the child processes."""
        await self._worker.shutdown()

    # -- operations ----------------------------------------------------------------------------------------------

    def _begin(self, request: ActorRequest) -> None:
        loop = asyncio.get_running_loop()
        if request.op == "cancel":
            if (task := self._running.get(*request.arguments)) is not None:
                task.cancel()
            return
        task = loop.create_task(self._run(request))
        if request.number == UNANSWERED:
            self._untold.add(task)
            task.add_done_callback(self._untold.discard)
        else:
            self._running[request.number] = task

    async def _run(self, request: ActorRequest) -> None:
        number = request.number
        try:
            operation = self._operations[request.op]
            answer = dump_answer(number, await operation(*request.arguments, timeout=request.timeout))
        except (EnvironmentRaised, OperationTimeout, WorkerLost) as failure:
            answer = dump_failure(number, failure)
        finally:
            self._running.pop(number, None)
        if number != UNANSWERED:
            self._answers.append(answer)
            self._reply_soon()

    async def _make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> tuple[Any, Any]:
        action, observation = await self._worker.make(key, source, kwargs, timeout=timeout)
        return describe_space(action), describe_space(observation)

    async def _close(self, key: str, *, timeout: float | None) -> None:
        await self._worker.close(key)

    # -- answers -------------------------------------------------------------------------------------------------

    def _reply_soon(self) -> None:
        if not self._answers or not self._parked or self._gathering is not None:
            return
        if self._running:
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_S, self._reply)
        else:
            self._reply()

    def _reply(self) -> None:
        """Let the oldest call return, with all answers that there are."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._parked:
            self._parked.popleft().set_result(b"".join(self._answers))
            self._answers.clear()
