"""HTTP to a registered server: to the address that was checked, no further, and never more than is allowed.

A third party's server has to accept only so many connections at one time.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import httpcore
import httpx
import orjson

from rollgym.env_server.common.logs import CURRENT_TRACE
from rollgym.env_server.gateway.upstream.base import UpstreamError, read_json
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from rollgym.env_server.workers.base import OperationTimeout

# Python's `http.server`, for one, has room for five connections that it has not accepted yet.
_AT_ONCE = 4
# After this time, an unanswered connection counts as accepted. The time grows after a lost connection.
_FIRST_PATIENCE_S = 0.05
_SHORTEST_PATIENCE_S = 0.0125
_LONGEST_PATIENCE_S = 1.6
# A server without room lets an attempt to connect be lost; the next comes after a second.
_LOST_ATTEMPT_S = 0.9
_REMEMBERED_S = 60.0
_MOST_INTERIM = 16
_STATUS_BYTES = 10
_CONNECT_TIMEOUT_S = 10.0
_MAX_DETAIL = 300
# Shorter than servers keep an idle connection (two seconds, as a rule, or five): one that is closed when a request is
# sent on it leaves open whether that was read.
_KEEP_ALIVE_S = 1.0
# The longest answer on another connection: this many seconds plus this many times the first duration.
_SECOND_ANSWER_S = 2.0
_SLOWER = 4.0


def connect(
    *, limits: httpx.Limits | None = None, verify: bool = True, **arguments: Any
) -> httpx.AsyncClient:
    """Make a client that raises only httpx's errors when connections break.

    Args:
        limits: The connections that it has and keeps; httpx's own, if None.
        verify: Whether it knows how to verify certificates; one that never speaks TLS need not.
        **arguments: Of `httpx.AsyncClient`. Environment variables are ignored.
    """
    transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits or httpx.Limits())
    # httpx hands no backend on.
    transport._pool._network_backend = Backend()
    return httpx.AsyncClient(transport=transport, trust_env=False, **arguments)


class Backend(httpcore.AsyncNetworkBackend):
    """Opens httpcore's connections through anyio."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a TCP connection to the address."""
        return _Stream(
            await self._backend.connect_tcp(
                host, port, timeout, local_address, None if socket_options is None else list(socket_options)
            )
        )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection within this machine."""
        options = None if socket_options is None else list(socket_options)
        return _Stream(await self._backend.connect_unix_socket(path, timeout, options))

    async def sleep(self, seconds: float) -> None:
        """Wait, as httpcore does between retries."""
        await self._backend.sleep(seconds)


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that keeps its properties after it has broken, and that bounds interim (1xx) answers."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._interim: InterimAnswers | None = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        if self._interim is not None and not self._interim.take(data):
            self._interim = None
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._interim = InterimAnswers()
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        try:
            return self._stream.get_extra_info(info)
        except AttributeError:
            # It has no socket any more. An idle connection that can be read from is one that has come to its end.
            return True if info == "is_readable" else None


class InterimAnswers:
    """The answers of 100 to 199 before the one that counts: each is read, and a server may send them for ever."""

    def __init__(self) -> None:
        self._count = 0
        self._rest = b""

    def take(self, data: bytes) -> bool:
        """Count the interim answers in received bytes; return whether more may come.

        Raises:
            httpcore.RemoteProtocolError: There are too many.
        """
        content = self._rest + data
        at = 0
        while content[at : at + 7] == b"HTTP/1." and content[at + 8 : at + 10] == b" 1":
            end = content.find(b"\r\n\r\n", at)
            if end < 0:
                break
            at = end + 4
            self._count += 1
            if self._count > _MOST_INTERIM:
                raise httpcore.RemoteProtocolError(f"it says to wait more than {_MOST_INTERIM} times")
        self._rest = content[at:]
        return len(self._rest) < _STATUS_BYTES or self._rest[8:10] == b" 1"


class Turns:
    """A semaphore that admits waiting tasks in order.

    Args:
        most: How many tasks may be inside at one time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a free place."""
        if self._inside < self.most and not self._waiting:
            self._inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It had come already.
                self.leave()
            raise

    def leave(self) -> None:
        """Let the next one in."""
        self._inside -= 1
        while self._waiting and self._inside < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


class Attempt:
    """One request, and the connection that it may have to make.

    Args:
        limiter: The limiter that it obeys.
    """

    def __init__(self, limiter: "ConnectionLimiter") -> None:
        self._limiter = limiter
        self._loop = asyncio.get_running_loop()
        self._began_at = 0.0
        self._accepted: asyncio.TimerHandle | None = None
        self.connects = False

    async def connecting(self) -> None:
        """Wait until the server can take one more connection."""
        await self._limiter.unaccepted.enter()
        self.connects = True
        self._began_at = self._loop.time()
        self._accepted = self._loop.call_later(self._limiter.patience_s, self._leave)

    def connected(self) -> None:
        """Note that the connection is there, or could not be made."""
        if self._loop.time() - self._began_at >= _LOST_ATTEMPT_S:
            self._limiter.lost(self._began_at)

    def ended(self, *, lost: bool) -> None:
        """Note that the request is answered, or that its connection was lost."""
        if self.connects and lost:
            self._limiter.lost(self._began_at)
        if self._accepted is not None:
            self._accepted.cancel()
            self._leave()

    def _leave(self) -> None:
        self._accepted = None
        self._limiter.unaccepted.leave()


class ConnectionLimiter:
    """Bounds the concurrent requests to one server, and the connections that it has not accepted yet.

    Args:
        most: The number of concurrent requests.

    Attributes:
        unaccepted: Connections that the server may not have accepted yet.
        patience_s: How long an unanswered connection counts as not accepted, in seconds.
    """

    def __init__(self, most: int) -> None:
        self._requests = Turns(most)
        self.unaccepted = Turns(_AT_ONCE)
        self.patience_s = _FIRST_PATIENCE_S
        self._changed_at = asyncio.get_running_loop().time()

    def narrow(self, most: int) -> None:
        """Let no more requests run than this from now on."""
        self._requests.most = min(most, self._requests.most)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[Attempt]:
        """Wait for one's turn, and hold it."""
        await self._requests.enter()
        try:
            yield Attempt(self)
        finally:
            self._requests.leave()
            self._recover()

    def lost(self, began_at: float) -> None:
        """Note that a connection was lost that began then; of several that were lost together, one counts."""
        if began_at >= self._changed_at:
            self.patience_s = min(_LONGEST_PATIENCE_S, 2 * self.patience_s)
            self._changed_at = asyncio.get_running_loop().time()

    def _recover(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._changed_at + _REMEMBERED_S:
            self.patience_s = max(_SHORTEST_PATIENCE_S, self.patience_s / 2)
            self._changed_at = now


class TargetClient:
    """Calls to one target with JSON bodies.

    Connections go to the pinned address; the name stands in the Host header and is what TLS certificates are checked
    against. Redirects are not followed, proxies and other settings of the process's environment do not apply.
    Connections are kept open for a moment, and no more are in use than the target accepts.

    Args:
        target: The checked target.
        token: Bearer token.
        limits: The largest reply, and the number of connections.
    """

    def __init__(self, target: Target, token: str | None, limits: TargetLimits) -> None:
        self._target = target
        self._token = token
        self._limit = limits.max_reply_bytes
        self._limiter = ConnectionLimiter(limits.max_connections)
        self._extensions = {"sni_hostname": target.host} if target.secure else {}
        self._calls = self._connects = 0
        self._client = self._connect(keep=True)

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None
    ) -> tuple[int, Any]:
        """Send a request; return the status and the JSON of the reply.

        The time-out begins when the request gets a connection, for which it waits at most as long again.

        Raises:
            OperationTimeout: The target did not answer in time.
            UpstreamError: The target cannot be reached, or its answer is too large, too deep or not JSON.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout):
                    attempt = await stack.enter_async_context(self._limiter.request())
            except TimeoutError as error:
                raise UpstreamError(
                    f"{self._target.url} was busy with other requests for {timeout:g} s", unsent=True
                ) from error
            status, reply = await self._answer(self._client, attempt, method, path, body, timeout)
        if not reply:
            return status, None
        try:
            return status, read_json(reply)
        except orjson.JSONDecodeError as error:
            if status >= 400:
                # Frameworks refuse with pages for people; the status says it all.
                return status, None
            raise UpstreamError(
                f"{method} {path} answered {status} with something that is not JSON"
            ) from error

    async def acquaint(self, path: str) -> str:
        """Detect how the target handles connections, after a few calls; return a sentence about it.

        A target that answers on one connection at a time gets one request at a time, and its connection is closed after
        each: an open one would block all its other clients.

        Args:
            path: A path that may be requested repeatedly.
        """
        if await self._answers_one_at_a_time(path):
            await self._client.aclose()
            self._client = self._connect(keep=False)
            self._limiter.narrow(1)
            return "it answers on one connection at a time: give it threads, and its sessions wait less"
        if self._connects >= self._calls:
            return "it closes its connection after each answer: HTTP/1.1 with keep-alive is faster"
        return "it keeps its connections, and answers on several at a time"

    async def close(self) -> None:
        """Close all connections to the target."""
        await self._client.aclose()

    def _connect(self, *, keep: bool) -> httpx.AsyncClient:
        target = self._target
        host = f"[{target.address}]" if ":" in target.address else target.address
        url = httpx.URL(target.url)
        headers = {"Host": url.netloc.decode(), "Accept": "application/json", "Accept-Encoding": "identity"}
        if not keep:
            headers["Connection"] = "close"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return connect(
            base_url=url.copy_with(host=host.strip("[]"), port=target.port),
            headers=headers,
            follow_redirects=False,
            # To read the certificates takes tens of milliseconds.
            verify=target.secure,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            # The limiter bounds the connections.
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None if keep else 0,
                keepalive_expiry=_KEEP_ALIVE_S,
            ),
        )

    async def _answers_one_at_a_time(self, path: str) -> bool:
        """Whether an idle connection keeps the target from answering on another one."""
        began = time.monotonic()
        await self._answer(self._client, Attempt(self._limiter), "GET", path, None, _CONNECT_TIMEOUT_S)
        patience_s = _SECOND_ANSWER_S + _SLOWER * (time.monotonic() - began)
        asking = self._connect(keep=False)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, idle = await asyncio.open_connection(self._target.address, self._target.port)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"{self._target.url} cannot be reached: {error}", away=True) from error
        try:
            await self._answer(asking, Attempt(self._limiter), "GET", path, None, patience_s)
        except (OperationTimeout, UpstreamError):
            return True
        finally:
            idle.close()
            await asking.aclose()
        return False

    async def _answer(
        self,
        client: httpx.AsyncClient,
        attempt: Attempt,
        method: str,
        path: str,
        body: Any,
        timeout: float | None,
    ) -> tuple[int, bytes]:
        request = self._request(client, method, path, body, attempt)
        lost = False
        try:
            async with asyncio.timeout(timeout):
                return await self._exchange(client, request)
        except TimeoutError as error:
            raise OperationTimeout(f"{self._target.url} did not answer in {timeout:g} s") from error
        except httpx.HTTPError as error:
            lost = True
            detail = str(error) or type(error).__name__
            unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise UpstreamError(
                f"{self._target.url} cannot be reached: {detail}", away=True, unsent=unsent
            ) from error
        finally:
            attempt.ended(lost=lost)
            self._calls += 1
            self._connects += attempt.connects

    def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any, attempt: Attempt
    ) -> httpx.Request:
        async def trace(event: str, info: Mapping[str, Any]) -> None:
            """Listen to the trace events of the connection pool."""
            if event == "connection.connect_tcp.started":
                await attempt.connecting()
            elif event in ("connection.connect_tcp.complete", "connection.connect_tcp.failed"):
                attempt.connected()

        content = None if body is None else orjson.dumps(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        if (traceparent := CURRENT_TRACE.get()) is not None:
            headers["traceparent"] = traceparent
        extensions = {**self._extensions, "trace": trace}
        return client.build_request(
            method, path.lstrip("/"), content=content, headers=headers, extensions=extensions
        )

    async def _exchange(self, client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
        response = await client.send(request, stream=True)
        try:
            if response.is_redirect:
                raise UpstreamError(
                    f"{self._target.url} redirects, which is not followed: register its real address"
                )
            if response.headers.get("content-encoding", "identity") != "identity":
                raise UpstreamError("a reply is compressed, which was not asked for")
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > self._limit:
                    raise UpstreamError(f"a reply is larger than {self._limit} bytes")
                parts.append(part)
        finally:
            await response.aclose()
        return response.status_code, b"".join(parts)


def detail_of(reply: Any) -> str:
    """The text of an error reply, in one line."""
    if isinstance(reply, dict):
        for name in ("detail", "message", "error"):
            if isinstance(reply.get(name), str):
                return str(reply[name])[:_MAX_DETAIL]
    return str(reply)[:_MAX_DETAIL]
