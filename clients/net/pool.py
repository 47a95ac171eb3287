"""The connections of one client: one to each I/O process of the server, reopened when they break."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rollgym.clients.net.connection import (
    MAX_MESSAGE_BYTES,
    Connection,
    ConnectionLost,
    open_socket,
    socket_url,
)
from rollgym.clients.protocol.errors import RETRY_LATER, ProblemError
from rollgym.clients.protocol.frames import SUBPROTOCOLS

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0
# The growth of the delay after each refusal of an overloaded server; the maximum below bounds it.
_OVERLOAD_GROWTH = 1.5
_MAX_OVERLOAD_DELAY_S = 60.0
_DEFAULT_MAX_REQUEST_BYTES = 1024 * 1024
_DEFAULT_MAX_BATCH = 1024
# A try that begins when hardly any time is left can still succeed.
_LAST_TRY_S = 0.2
# A server that was reached before has this long for a handshake, however soon one that was not is given up.
_RECONNECT_TRY_S = 5.0
# The largest number of processes; a server that claims more is not searched for all of them.
_MOST_PROCESSES = 256


class NotAServerError(ConnectionError):
    """The peer is not a Rollgym server, and a retry will not change that."""


class Timing(NamedTuple):
    """How long a client waits.

    Attributes:
        connect_s: For a server that was never reached.
        reconnect_s: For a server that was reached before.
        operation_s: For one operation, reconnects and retries included.
        silence_s: Seconds of silence, while answers are pending, after which the server gets a ping ...
        pong_s: ... and seconds to wait for its pong before the connection is dropped.
    """

    connect_s: float
    reconnect_s: float
    operation_s: float
    silence_s: float = 20.0
    pong_s: float = 30.0


class Backoff:
    """Exponential delays with jitter, so that many clients do not retry in step.

    Args:
        jitter: An own stream of random numbers.
    """

    def __init__(self, jitter: random.Random) -> None:
        self._jitter = jitter

    def delay(self, attempt: int) -> float:
        """Return seconds to wait before the attempt after this many failed ones."""
        ceiling = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(attempt, 16))
        return ceiling * self._jitter.uniform(0.5, 1.0)

    def delay_after(self, problem: ProblemError, attempt: int) -> float:
        """Return the delay that the server asked for, or else the usual one.

        An overloaded server sends all waiting clients the same delay: jitter spreads their retries over half of it.
        """
        asked = problem.extra.get("retry_after")
        if not isinstance(asked, (int, float)) or isinstance(asked, bool) or not asked >= 0:
            return self.delay(attempt)
        if problem.code != "overloaded":
            return float(asked) + self.delay(0)
        grown = max(float(asked), _FIRST_DELAY_S) * _OVERLOAD_GROWTH ** min(attempt, 16)
        return min(_MAX_OVERLOAD_DELAY_S, grown * self._jitter.uniform(1.0, 1.5))


class ConnectionPool:
    """Connections by the index of the I/O process that they reach.

    Which process answers a new socket is the kernel's choice, so sockets are opened until there is one to each,
    a bounded number of times. A process without one is reached through any other; the server forwards.

    Args:
        url: The server's address.
        headers: Headers of each handshake.
        binary: Whether frames are MessagePack.
        timing: How long to wait.
        jitter: A separate random generator for the delays.
        address: The address to connect to instead of resolving the URL's host name.
        max_message_bytes: A larger message of the server ends the connection.

    Attributes:
        info: The server's description of itself at the last connect.
        on_lost: Called with the index of a process when the connection to it breaks.
        on_outage: Called once with the reason when no process can be reached, and with None when one can again.
        explain: Maps the problem of a refused connection to the one to raise.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        binary: bool,
        timing: Timing,
        jitter: random.Random,
        address: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.url = url
        self.backoff = Backoff(jitter)
        self.info: dict[str, Any] = {}
        self.on_lost: Callable[[int], None] | None = None
        self.on_outage: Callable[[Exception | None], None] | None = None
        self.explain: Callable[[ProblemError], ProblemError] = lambda problem: problem
        self.max_request_bytes = _DEFAULT_MAX_REQUEST_BYTES
        self._max_restore_bytes = _DEFAULT_MAX_REQUEST_BYTES
        self.max_batch = _DEFAULT_MAX_BATCH
        self._socket_url = socket_url(url)
        self._headers = headers
        self._binary = binary
        self._timing = timing
        self._address = address
        self._max_message_bytes = max_message_bytes
        self._connections: dict[int, Connection] = {}
        self._filling: asyncio.Task[None] | None = None
        self._refill_at = 0.0
        self._reached = False
        self._turn = 0
        self._closed = False

    def request_limit(self, op: str) -> int:
        """Return the bytes that the server takes in a request of an operation."""
        return self._max_restore_bytes if op == "restore" else self.max_request_bytes

    def ready(self, process: int | None) -> Connection | None:
        """Return an open connection to this process (any, if None) without waiting, if there is one."""
        if process is None:
            return next((each for each in self._connections.values() if each.open), None)
        connection = self._connections.get(process)
        return connection if connection is not None and connection.open else None

    async def connection(self, process: int | None) -> Connection:
        """Return a connection to this process, or else to any, connecting as needed.

        Raises:
            ConnectionError: The server cannot be reached in time.
            ProblemError: It refuses us; one that says later is raised only when that is past the time.
        """
        if self._closed:
            raise ConnectionError("the client is closed")
        found = self.ready(process)
        other = found or self.ready(None)
        if found is None and (other is None or asyncio.get_running_loop().time() >= self._refill_at):
            if self._filling is None:
                self._filling = asyncio.ensure_future(self._fill())
                self._filling.add_done_callback(self._filled)
            # Many tasks may wait for the one attempt; one that is cancelled must not end it.
            await self._wait_for(self._filling)
            found = self.ready(process) or self.ready(None)
        if found is None:
            found = other
        if found is None:
            raise ConnectionLost("the connection broke at once")
        return found

    async def next_process(self) -> int:
        """Return the index of the process that gets the next new sessions: each in its turn."""
        await self.connection(None)
        reached = sorted(index for index, each in self._connections.items() if each.open)
        self._turn += 1
        return reached[self._turn % len(reached)] if reached else 0

    @property
    def processes(self) -> list[int]:
        """The indices of the processes that there are open connections to."""
        return sorted(index for index, each in self._connections.items() if each.open)

    async def close(self) -> None:
        """Close all connections; the pool cannot be used again."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
        await asyncio.gather(*(each.close() for each in self._connections.values()))
        self._connections.clear()

    async def _wait_for(self, filling: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(filling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            given_up = task is not None and task.cancelling() > 0
            if filling.cancelled() and not given_up:  # by `close`, and not the waiting task itself
                raise ConnectionError("the client is closed") from None
            raise

    def _filled(self, task: asyncio.Task[None]) -> None:
        self._filling = None
        if not task.cancelled():
            task.exception()  # every waiter received it; this avoids a warning if there is none

    async def _fill(self) -> None:
        """Open connections until there is one to each process."""
        if self.ready(None) is None:
            await self._connect_patiently()
        count = min(_MOST_PROCESSES, _whole(self.info, "processes", 1))
        for _ in range(4 * count + 4):
            if len(self.processes) >= count:
                break
            try:
                surplus = self._adopt(*await self._open(math.inf))
            except (ConnectionError, ProblemError):
                break  # one of the processes is away; the others do
            if surplus is not None:
                await surplus.close()
        self._refill_at = asyncio.get_running_loop().time() + _MAX_DELAY_S

    async def _connect_patiently(self) -> None:
        loop = asyncio.get_running_loop()
        patience = self._timing.reconnect_s if self._reached else self._timing.connect_s
        began = loop.time()
        give_up_at = began + patience
        attempt = 0
        told = False
        while True:
            left = give_up_at - loop.time()
            try:
                self._adopt(*await self._open(max(left, _LAST_TRY_S)))
            except ProblemError as problem:
                if problem.code not in RETRY_LATER:
                    raise self.explain(problem) from None
                error: Exception = problem
                delay = least = self.backoff.delay_after(problem, attempt)
            except NotAServerError:
                raise
            except ConnectionError as lost:
                error = lost
                delay, least = self.backoff.delay(attempt), 0.0
            else:
                if told:
                    self._tell(None)
                return
            if self._reached and not told:
                told = True
                self._tell(error)
            left = give_up_at - loop.time()
            if left < max(least, _LAST_TRY_S):
                if isinstance(error, ProblemError):
                    raise error  # It does answer.
                raise self._no_answer(loop.time() - began, error) from error
            # The last try is made as late as it can be: a server that is about to start may be there by then.
            await asyncio.sleep(min(delay, left - _LAST_TRY_S) if not least else delay)
            attempt += 1

    def _no_answer(self, waited: float, error: Exception) -> ConnectionError:
        remedy = (
            "see whether it still runs"
            if self._reached
            else "start one with `roll-serve`, or mend the address"
        )
        return ConnectionError(f"no server answers at {self.url}: {error}; waited {waited:.1f} s: {remedy}")

    async def _open(self, left_s: float) -> tuple[Connection, dict[str, Any]]:
        """Open one connection and identify the process that answered, within the remaining time."""
        loop = asyncio.get_running_loop()
        timeout_s = self._timing.connect_s
        if self._reached:
            timeout_s = max(timeout_s, _RECONNECT_TRY_S)
        timeout_s = min(timeout_s, left_s)
        deadline = loop.time() + timeout_s
        socket = await open_socket(
            self._socket_url,
            headers=self._headers,
            subprotocol=SUBPROTOCOLS[self._binary],
            timeout_s=timeout_s,
            address=self._address,
            max_message_bytes=self._max_message_bytes,
        )
        connection = Connection(
            socket, binary=self._binary, silence_s=self._timing.silence_s, pong_s=self._timing.pong_s
        )
        try:
            reply = await connection.request({"op": "info"}, deadline, self.max_request_bytes)
        except TimeoutError as error:
            await connection.close()
            raise ConnectionLost(f"{self.url} did not say who it is") from error
        except ConnectionLost as error:
            await connection.close()
            if connection.heard_nonsense:
                raise self._says_nonsense("what is no answer") from error
            raise
        except BaseException:
            await connection.close()
            raise
        if not isinstance(reply.payload, dict):
            await connection.close()
            raise self._says_nonsense(type(reply.payload).__name__)
        return connection, reply.payload

    def _says_nonsense(self, said: str) -> NotAServerError:
        return NotAServerError(f"{self.url} does not say who it is, but answers info with {said}")

    def _adopt(self, connection: Connection, info: dict[str, Any]) -> Connection | None:
        """Keep a connection, or return it when there is one to that process already."""
        self._reached = True
        self.info = info
        limits = info.get("limits")
        self.max_request_bytes = _whole(limits, "max_request_bytes", _DEFAULT_MAX_REQUEST_BYTES)
        self._max_restore_bytes = _whole(limits, "max_restore_bytes", self.max_request_bytes)
        self.max_batch = max(1, _whole(limits, "max_batch", _DEFAULT_MAX_BATCH))
        connection.process = _whole(info, "process", 0)
        present = self._connections.get(connection.process)
        if present is not None and present.open:
            return connection
        self._connections[connection.process] = connection
        connection.on_lost = partial(self._lost, connection.process)
        return None

    def _tell(self, error: Exception | None) -> None:
        if self.on_outage is not None:
            self.on_outage(error)

    def _lost(self, process: int) -> None:
        if self.on_lost is not None and not self._closed:
            self.on_lost(process)


def _whole(said: Any, name: str, default: int) -> int:
    """Return a whole number that a server says of itself, or the default if it does not."""
    value = said.get(name) if isinstance(said, Mapping) else None
    return value if type(value) is int and value >= 0 else default
