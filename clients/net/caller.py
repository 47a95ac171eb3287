"""Calls with retries: after a broken connection, and after a refusal with a retry delay."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import secrets
from collections.abc import Collection
from typing import Any, NamedTuple

from rollgym.clients.net.connection import MAX_MESSAGE_BYTES, Connection, ConnectionLost, Reply
from rollgym.clients.net.pool import ConnectionPool, Timing
from rollgym.clients.protocol.errors import RETRY_LATER, ProblemError

_GRACE_S = 30.0
_TOKEN = re.compile(r"[!-~]*")

_log = logging.getLogger(__name__)


class Backpressure(NamedTuple):
    """How much a client has waited because its server was overloaded.

    Attributes:
        overloaded: How often the server has answered `overloaded`: for a batch, once for all of its operations that
            were refused.
        waited_s: The total wait of operations before their retries, in seconds.
    """

    overloaded: int = 0
    waited_s: float = 0.0


def bearer_headers(token: str | None) -> dict[str, str]:
    """Return the header that a token goes in.

    Raises:
        ValueError: It contains characters that a header cannot.
    """
    if token is None:
        return {}
    if _TOKEN.fullmatch(token) is None:
        # The token itself is not shown.
        raise ValueError(
            "a token has letters, digits and signs of ASCII only: is there a line break or a blank at its end?"
        )
    return {"Authorization": f"Bearer {token}"}


class ServerCalls:
    """Operations on one server, each safe to repeat.

    Args:
        url: The server's address.
        token: Bearer token.
        binary: Whether frames are MessagePack.
        timing: The time-outs.
        address: The address to connect to instead of resolving the URL's host name.
        max_message_bytes: A larger message of the server ends the connection.

    Attributes:
        pool: Its connections.
        backpressure: The waits caused by an overloaded server.

    Raises:
        ValueError: The token cannot be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        binary: bool,
        timing: Timing,
        address: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.binary = binary
        self.pool = ConnectionPool(
            url,
            headers=bearer_headers(token),
            binary=binary,
            timing=timing,
            jitter=random.Random(secrets.randbits(64)),
            address=address,
            max_message_bytes=max_message_bytes,
        )
        self._patience_s = timing.operation_s
        self._request_prefix = secrets.token_hex(12)
        self._request_numbers = itertools.count()
        self._complained = False
        self.backpressure = Backpressure()

    def new_request_id(self) -> str:
        """Return an id by which the server knows a repeated request."""
        return f"{self._request_prefix}-{next(self._request_numbers)}"

    def deadline(self, timeout_s: float | None = None) -> float:
        """Return the deadline of an operation that begins now, on the loop's clock.

        Args:
            timeout_s: The operation's own time limit on the server, if it has one.
        """
        patience = self._patience_s
        if timeout_s is not None:
            patience = max(patience, timeout_s + _GRACE_S)
        return asyncio.get_running_loop().time() + patience

    async def call(
        self,
        fields: dict[str, Any],
        process: int | None,
        deadline: float,
        *,
        passed_on: Collection[str] = (),
    ) -> Reply:
        """Send one operation, with retries, until it is answered.

        Args:
            fields: The frame without its id. It must be safe to repeat: all operations of the protocol are, with a
                `request_id` or a step's indices.
            process: The I/O process to send it to; any, if None.
            deadline: When to give up, on the loop's clock.
            passed_on: Problem codes that are raised although they allow a retry: the caller waits itself.

        Raises:
            ProblemError: The server refuses; one that allows a retry is raised only if the retry would pass the
                deadline.
            ConnectionError: The server cannot be reached.
            TimeoutError: The server does not answer.
        """
        pool = self.pool
        attempt = 0
        while True:
            connection = None
            try:
                connection = pool.ready(process)
                if connection is None:
                    connection = await self._connect(process, deadline)
                reply = await connection.request(fields, deadline, pool.request_limit(fields["op"]))
                if attempt:
                    self._complained = False
                return reply
            except ConnectionLost as lost:
                error: Exception = lost
                delay = pool.backoff.delay(attempt - 1) if attempt else 0.0
            except ProblemError as problem:
                if connection is None:
                    raise  # While connecting, it was retried until the deadline already.
                if problem.code in passed_on:
                    raise
                # `busy` after a break: the request that the break cut off still runs.
                if problem.code not in RETRY_LATER and not (problem.code == "busy" and attempt):
                    raise
                error = problem
                delay = pool.backoff.delay_after(problem, attempt)
            await self._wait(error, delay, deadline)
            attempt += 1

    async def postpone(self, problem: ProblemError, attempt: int, deadline: float) -> None:
        """Wait for the delay that a server's refusal asks for.

        Args:
            problem: The refusal.
            attempt: The number of refusals before.
            deadline: When to give up, on the loop's clock.

        Raises:
            ProblemError: The refusal, if the retry would be past the deadline.
        """
        await self._wait(problem, self.pool.backoff.delay_after(problem, attempt), deadline)

    async def _wait(self, error: Exception, delay: float, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began + delay >= deadline:
            raise error
        # A thousand calls that wait for one server are one complaint.
        if not self._complained and self.pool.on_outage is None:
            self._complained = True
            _log.warning("%s: %s; asking again until it answers", self.pool.url, error)
        if not (isinstance(error, ProblemError) and error.code == "overloaded"):
            await asyncio.sleep(delay)
            return
        self._note(Backpressure(overloaded=1))
        try:
            await asyncio.sleep(delay)
        finally:
            self._note(Backpressure(waited_s=loop.time() - began))

    def _note(self, more: Backpressure) -> None:
        so_far = self.backpressure
        self.backpressure = Backpressure(so_far.overloaded + more.overloaded, so_far.waited_s + more.waited_s)

    async def _connect(self, process: int | None, deadline: float) -> Connection:
        try:
            async with asyncio.timeout_at(deadline):
                return await self.pool.connection(process)
        except TimeoutError:
            raise TimeoutError(f"no connection to {self.pool.url} in time") from None
