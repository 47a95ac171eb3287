"""HTTP to a registered server: to the address that was checked, no further, and never more than is allowed."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import orjson

from rollgym.env_server.gateway.upstream.base import UpstreamError
from rollgym.env_server.gateway.upstream.connections import Attempt, ConnectionLimiter, connect
from rollgym.env_server.gateway.upstream.reading import read_json
from rollgym.env_server.gateway.upstream.targets import Target
from rollgym.env_server.telemetry.logs import CURRENT_TRACE
from rollgym.env_server.workers.base import OperationTimeout

_CONNECT_TIMEOUT_S = 10.0
_MAX_DETAIL = 300
# Shorter than servers keep an idle connection (two seconds, as a rule, or five): one that is closed when a request is
# sent on it leaves open whether that was read.
_KEEP_ALIVE_S = 1.0
# The longest answer on another connection: this many seconds plus this many times the first duration.
_SECOND_ANSWER_S = 2.0
_SLOWER = 4.0


class TargetLimits(NamedTuple):
    """The limits for replies of a target and for connections to it.

    Attributes:
        max_reply_bytes: Larger replies are refused.
        max_connections: How many are in use at one time.
    """

    max_reply_bytes: int
    max_connections: int


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
