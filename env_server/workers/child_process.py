"""One worker child process, as its I/O process sees it."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from rollgym.env_server.common.logs import LogFormat
from rollgym.env_server.common.metrics import OperationTimes
from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout, WorkerLost
from rollgym.env_server.workers.wire import (
    READY,
    RESULT,
    Frame,
    FrameSplitter,
    dump_request,
    frame,
    load_result,
)

# The child has the import path of this process: environments are imported there as the catalog found them here.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollgym.env_server.workers.child import main; main(int(sys.argv[2]), sys.argv[3])"
)
_START_TIMEOUT_S = 120.0
_ABANDONED_GRACE_S = 1.0
_LAST_WORDS_S = 0.5
_CLOCK_TICK_S = 1e-3
_MAX_NUMBER = 2**32


class ChildOperation:
    """An operation that was sent to a child.

    Attributes:
        op: Its name.
        number: The number of its frames.
        environment: The number of the environment that it is on, or -1.
        future: Receives its result; None if no caller waits for it.
        timeout: How long it may run, counted from when the child starts it.
        asked_at: When it was sent, by the performance counter.
    """

    __slots__ = ("asked_at", "environment", "future", "number", "op", "timeout")

    def __init__(
        self,
        op: str,
        number: int,
        environment: int,
        future: "asyncio.Future[Any] | None",
        timeout: float | None,
    ) -> None:
        self.op = op
        self.number = number
        self.environment = environment
        self.future = future
        self.timeout = timeout
        self.asked_at = time.perf_counter()


def _start(log_format: LogFormat) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a child; return it, and this process's end of the socket between the two.

    Raises:
        OSError: There is no memory, process or descriptor for it; nothing is left of the attempt.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            started = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), log_format],
                stdin=subprocess.DEVNULL,
                # The server's own standard output is for its ready line.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                # A process group of its own: processes that environments start end with it, and Ctrl-C reaches the
                # server alone.
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return started, ours


class ChildProcess(asyncio.Protocol):
    """Starts a child process, sends it operations, and kills it when one takes too long.

    The child runs operations in order, so the oldest unanswered one is the one that runs. One timer watches it; the
    timer is set again only if it would fire too late, not for each operation.

    Args:
        ended: Called once when the child has ended, after its operations have failed.
        times: Records how long operations took.
        log_format: How the lines of the child's log look.

    Attributes:
        lost_by: Why it ended, once it has: it died, an operation took too long, or it could not be started.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, ended: "Callable[[ChildProcess], None]", times: OperationTimes, log_format: LogFormat
    ) -> None:
        # First of all: of one that cannot be started, nothing may be left that runs later.
        self._process, ours = _start(log_format)
        self.lost_by: Literal["died", "timeout", "start"] = "died"
        self._times = times
        self._turned_at = time.perf_counter()
        self.environments: set[int] = set()
        self.prepared: set[bytes] = set()
        self.ready = False
        self.alive = True
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._watch(ours)
        self._reader = FrameSplitter()
        self._queue: deque[ChildOperation] = deque()
        self._number = 0
        self._head_since = self._loop.time()
        self._timer_at = self._loop.time() + _START_TIMEOUT_S
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._timer_at, self._check)
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._connecting = self._loop.create_task(self._connect(ours))

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    @property
    def load(self) -> int:
        """Operations that it has not answered."""
        return len(self._queue)

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(
        self, op: str, arguments: tuple[Any, ...], *, environment: int = -1, timeout: float | None
    ) -> ChildOperation:
        """Send an operation; return the future of its result.

        The future raises `EnvironmentRaised`, `OperationTimeout` (the operation took too long and the child was
        ended) or `WorkerLost`.
        """
        return self._ask(op, arguments, environment, self._loop.create_future(), timeout)

    def tell(self, op: str, arguments: tuple[Any, ...], *, timeout: float) -> None:
        """Send an operation whose result is discarded."""
        self._ask(op, arguments, -1, None, timeout)

    def _ask(
        self,
        op: str,
        arguments: tuple[Any, ...],
        environment: int,
        future: "asyncio.Future[Any] | None",
        timeout: float | None,
    ) -> ChildOperation:
        number = self._number = (self._number + 1) % _MAX_NUMBER
        operation = ChildOperation(op, number, environment, future, timeout)
        if not self.alive:
            self._tell_lost(operation, "the worker process has ended")
            return operation
        if not self._queue:
            self._head_since = self._loop.time()
            self._turned_at = operation.asked_at
        self._queue.append(operation)
        content = frame(number, 0, dump_request((op, arguments)))
        if self._transport is None:
            self._unsent.append(content)
        else:
            self._transport.write(content)
        self._arm()
        return operation

    def abandon(self, operation: ChildOperation) -> None:
        """Stop waiting for an operation. It may finish, but gets little time for that."""
        if not self._queue:
            return
        grace = _ABANDONED_GRACE_S
        if operation is self._queue[0]:
            grace += self._loop.time() - self._head_since
        if operation.timeout is None or operation.timeout > grace:
            operation.timeout = grace
        self._arm()

    def give_up(self, environment: int) -> None:
        """Fail the operation on an environment, if one runs, because the environment is gone."""
        for operation in self._queue:
            if operation.environment == environment:
                self._tell_lost(operation, "the environment was closed")
                self.abandon(operation)

    # -- the time ------------------------------------------------------------------------------------------------

    def _deadline(self) -> float | None:
        if not self.ready:
            return self._head_since + _START_TIMEOUT_S
        if not self._queue or self._queue[0].timeout is None:
            return None
        return self._head_since + self._queue[0].timeout

    def _arm(self) -> None:
        deadline = self._deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        # A deadline that has passed makes uvloop's timer a plain handle, which does not know when it is due.
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline is None:
            return
        # The loop may call a timer a clock tick early; the deadline that it was set for has come all the same.
        if deadline > self._loop.time() + _CLOCK_TICK_S:
            self._arm()
            return
        if self.ready:
            first = self._queue.popleft()
            self._count(first)
            self.lost_by = "timeout"
            if first.future is not None and not first.future.done():
                first.future.set_exception(OperationTimeout(f"no answer within {first.timeout:g} s"))
            self._end("another environment of the worker process hung", at_fault=False)
        else:
            self._end("the worker process did not start in time", at_fault=False)

    # -- the socket ----------------------------------------------------------------------------------------------

    async def _connect(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        if not self.alive:
            transport.abort()
            return
        self._transport = transport
        transport.writelines(self._unsent)
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """Feed received bytes to the parser and resolve the operations that they answer."""
        for reply in self._reader.feed(data):
            if reply.status == READY:
                self.ready = True
                self._head_since = self._loop.time()
                self._turned_at = time.perf_counter()
                self._arm()
            elif self._queue and reply.number == self._queue[0].number:
                self._take(reply)
            else:
                # A process that an environment forked off came back from the operation, too, and answers with it.
                self._end("the worker process answered what it was not asked", at_fault=True)
                return

    def _take(self, reply: Frame) -> None:
        operation = self._queue.popleft()
        self._count(operation)
        if self._queue:
            self._head_since = self._loop.time()
            self._arm()
        future = operation.future
        if future is None or future.done():
            return
        try:
            result = load_result(reply.body)
        except pickle.UnpicklingError as error:
            future.set_exception(EnvironmentRaised("TypeError", str(error)))
            return
        if reply.status == RESULT:
            future.set_result(result)
        else:
            future.set_exception(EnvironmentRaised(*result))

    def _count(self, operation: ChildOperation) -> None:
        """Count how long the operation that ran had waited, and how long it ran."""
        now = time.perf_counter()
        if operation.future is not None:
            op = "verify" if operation.op == "score" else operation.op
            self._times.waited[op].add(self._turned_at - operation.asked_at)
            self._times.ran[op].add(now - self._turned_at)
        self._turned_at = now

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the child has closed its end."""
        self._end("the worker process died", at_fault=True)

    # -- the end -------------------------------------------------------------------------------------------------

    def _watch(self, ours: socket.socket) -> None:
        """Start the thread that waits for the child's end; without one, the child ends here.

        Raises:
            OSError: There is no room for a thread.
        """
        try:
            threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()
        except RuntimeError as error:
            self._process.kill()
            self._process.wait()
            ours.close()
            raise OSError(str(error)) from error

    def _wait(self) -> None:
        """Wait for the child's end, in a thread of its own; its exit code is collected there."""
        self._process.wait()
        # The loop may be closed by now: then no task is left to notify.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._exited)

    def _exited(self) -> None:
        # Its last replies may still be in the socket. A process that an environment has started may hold the socket
        # open, so an open socket proves nothing.
        if self.alive:
            self._loop.call_later(_LAST_WORDS_S, self._end, "the worker process died", True)

    def _end(self, reason: str, at_fault: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        if not self.ready:
            self.lost_by = "start"
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self.kill()
        queue = list(self._queue)
        self._queue.clear()
        for position, operation in enumerate(queue):
            self._tell_lost(operation, reason, at_fault=at_fault and self.ready and position == 0)
        self._ended(self)

    def _tell_lost(self, operation: ChildOperation, reason: str, *, at_fault: bool = False) -> None:
        if operation.future is not None and not operation.future.done():
            operation.future.set_exception(WorkerLost(reason, at_fault=at_fault))

    def kill(self) -> None:
        """Kill the child and all processes that it has started."""
        # The group may be empty already.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Let the child close its environments, and end it."""
        if self.alive:
            exiting = self.ask("exit", (), timeout=None)
            assert exiting.future is not None
            with contextlib.suppress(WorkerLost, OperationTimeout, TimeoutError):
                await asyncio.wait_for(exiting.future, grace_s)
        self._end("the server stops", at_fault=False)
