"""A few processes for functions that may take for ever: a call that overruns its wall clock costs one of them.

The clock stands still while a call stands in line for a processor (where Linux tells), up to a bound: whether an answer
is read in time is a matter of the answer, and not of what else the machine does.

Nothing here relies on signals or on the main thread, so calls may come from any thread of a server, a worker or a
notebook. The processes hold what the function's module imports, and one that was ended is replaced at once, so that the
next call does not wait for the imports longer than it must.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rollgym.clients.measuring.metrics import queued_seconds

# The child has the import path of this process.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollgym.envs.verifiers.pool_child import main; main(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))"
)
_START_TIMEOUT_S = 120.0
_MEMORY_BYTES = 4 * 2**30
_LEAST_WAIT_S = 0.001
# A call on a busy machine may take so many times its time.
_MOST_DELAYED = 3
LINGER_S = 60.0
"""Processes that nobody uses any more stay so long."""


class CallTimeout(Exception):  # noqa: N818 - the name says what happened
    """The call did not end in time; its process was ended."""


class CallFailed(Exception):  # noqa: N818 - the name says what happened
    """The function raised, or its process died."""


class NoProcess(CallFailed):
    """No process could make the call, which says nothing about the argument."""


class ProcessPool:
    """Calls one function in child processes, each call under a clock.

    Args:
        target: `module:function`. It takes one JSON value and returns one.
        size: Calls that may run at a time; each has a process of its own.
        memory_bytes: Address space that a process may have; a call that wants more fails.
        queued: Tells how long a process has stood in line for a processor, in seconds; None where nothing tells.

    Attributes:
        replaced: How many processes were ended because a call took too long, or died.
    """

    def __init__(
        self,
        target: str,
        size: int = 1,
        memory_bytes: int = _MEMORY_BYTES,
        queued: Callable[[int], float | None] = queued_seconds,
    ) -> None:
        self.replaced = 0
        self._queued = queued
        self._target = target
        self._memory_bytes = memory_bytes
        self._free: list[_Process | None] = [None] * size
        self._busy: set[_Process] = set()
        self._closed = False
        self._changed = threading.Condition()

    def call(self, argument: Any, timeout_s: float) -> Any:
        """Call the function; the clock runs from when a process is ready for it.

        Raises:
            CallTimeout: It took longer; the process was ended and is replaced.
            CallFailed: It raised, or its process died.
            NoProcess: No process could be started, or the one that waited has died before the call.
        """
        process = self._take()
        healthy = False
        try:
            result = process.call(argument, timeout_s)
            healthy = True
            return result
        except _RaisedError as raised:
            healthy = True
            raise CallFailed(str(raised)) from None
        finally:
            self._give_back(process, healthy)

    def pids(self) -> list[int]:
        """The processes that are there."""
        with self._changed:
            return [process.pid for process in (*self._free, *self._busy) if process is not None]

    def close(self) -> None:
        """End all processes; a call that runs fails. Closing again does nothing."""
        with self._changed:
            self._closed = True
            unused = [process for process in self._free if process is not None]
            self._free = []
            for process in self._busy:
                # The thread that waits for it sees that it died, and clears up.
                process.kill()
            self._changed.notify_all()
        for process in unused:
            process.end()

    def _take(self) -> "_Process":
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()
            if self._closed:
                raise NoProcess("the pool is closed")
            # One that is loaded already, if there is any.
            index = next((index for index, each in enumerate(self._free) if each is not None), 0)
            process = self._free.pop(index)
            try:
                process = process or self._start()
            except OSError as error:
                self._free.append(None)
                self._changed.notify()
                raise NoProcess(f"no process could be started: {error}") from error
            self._busy.add(process)
            return process

    def _give_back(self, process: "_Process", healthy: bool) -> None:
        with self._changed:
            self._busy.discard(process)
            if healthy and not self._closed:
                self._free.append(process)
                self._changed.notify()
                return
        process.end()
        with self._changed:
            if self._closed:
                return
            self.replaced += 1
            try:
                self._free.append(self._start())
            except OSError:
                # The next call tries again, and says so if that fails, too.
                self._free.append(None)
            self._changed.notify()

    def _start(self) -> "_Process":
        return _Process(self._target, self._memory_bytes, self._queued)


class _RaisedError(Exception):
    """The function raised."""


class _Process:
    """One child with its end of a socket pair."""

    def __init__(self, target: str, memory_bytes: int, queued: Callable[[int], float | None]) -> None:
        self._queued = queued
        ours, theirs = socket.socketpair()
        with theirs:
            words = [json.dumps(sys.path), str(theirs.fileno()), target, str(memory_bytes)]
            # In the group of its parent: ending that group ends this, too.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *words],
                stdin=subprocess.DEVNULL,
                # What iterates over sets of texts does so in the same order in every process.
                env=os.environ | {"PYTHONHASHSEED": "0"},
                # Standard output may be a protocol of the parent's.
                stdout=2,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = Connection(ours.detach())
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, argument: Any, timeout_s: float) -> Any:
        if not self._ready:
            try:
                self._answer(_START_TIMEOUT_S, lambda: CallFailed("it was not ready in time"))
            except CallFailed as failed:
                raise NoProcess(f"no process could be started: {failed}") from failed
            self._ready = True
        try:
            self._connection.send_bytes(json.dumps(argument).encode())
        except OSError as error:
            raise NoProcess("the process died before the call") from error
        return self._answer(timeout_s, lambda: CallTimeout(f"no result within {timeout_s:g} s"))

    def _answer(self, timeout_s: float, late: Callable[[], Exception]) -> Any:
        begun, queued_before = time.monotonic(), self._queued(self.pid) or 0.0
        deadline = begun + timeout_s
        try:
            while not self._connection.poll(max(_LEAST_WAIT_S, deadline - time.monotonic())):
                queued = (self._queued(self.pid) or 0.0) - queued_before
                deadline = begun + min(timeout_s + queued, _MOST_DELAYED * timeout_s)
                if deadline - time.monotonic() < _LEAST_WAIT_S:
                    raise late()
            kind, value = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise CallFailed("the process died") from error
        if kind == "raised":
            raise _RaisedError(value)
        return value

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


class _Shared:
    """Pools that several verifiers of a process use, with how many do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, int], tuple[ProcessPool, int]] = {}

    def borrow(self, target: str, size: int) -> ProcessPool:
        with self._lock:
            pool, users = self._pools.get((target, size)) or (ProcessPool(target, size), 0)
            self._pools[target, size] = pool, users + 1
            return pool

    def give_back(self, target: str, size: int) -> None:
        with self._lock:
            pool, users = self._pools[target, size]
            self._pools[target, size] = pool, users - 1
            if users == 1:
                timer = threading.Timer(LINGER_S, self._end_unused, (target, size, pool))
                timer.daemon = True
                timer.start()

    def _end_unused(self, target: str, size: int, pool: ProcessPool) -> None:
        with self._lock:
            if self._pools.get((target, size)) != (pool, 0):
                return
            del self._pools[target, size]
        pool.close()


# The processes are a resource of the whole process, as its memory is: a pool for each verifier would hold the same
# libraries many times.
_shared = _Shared()


class PoolShare:
    """One user's share of the process's pool for a function.

    The processes stay for a minute after the last user has closed its share: sessions come and go, and each would pay
    for the imports again.

    Args:
        target: `module:function`.
        size: Calls that may run at a time.
    """

    def __init__(self, target: str, size: int = 1) -> None:
        self._target = target
        self._size = size
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    @property
    def pool(self) -> ProcessPool:
        """The pool; there is none before it is first asked for."""
        with self._lock:
            if self._pool is None:
                self._pool = _shared.borrow(self._target, self._size)
            return self._pool

    def close(self) -> None:
        """Use it no more; asking for the pool again takes a new share."""
        with self._lock:
            if self._pool is not None:
                self._pool = None
                _shared.give_back(self._target, self._size)
