"""HTTP to a registered server: to the address that was checked, no further, and never more than is allowed."""

import asyncio
from typing import Any

import httpx
import orjson

from env_server.gateway.targets import Target
from env_server.gateway.upstream import UpstreamError
from env_server.traceparent import CURRENT
from env_server.workers.base import OperationTimeout

_CONNECT_TIMEOUT_S = 10.0
_MAX_DETAIL = 300


class TargetClient:
    """Calls to one target with JSON bodies.

    Connections go to the pinned address; the name stands in the Host header and is what TLS certificates are checked
    against. Redirects are not followed, proxies and other settings of the process's environment do not apply.

    Args:
        target: Where to.
        token: Bearer token.
        max_reply_bytes: Larger replies are refused.
    """

    def __init__(self, target: Target, token: str | None, max_reply_bytes: int) -> None:
        self._target = target
        self._limit = max_reply_bytes
        host = f"[{target.address}]" if ":" in target.address else target.address
        url = httpx.URL(target.url)
        headers = {"Host": url.netloc.decode(), "Accept": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._extensions = {"sni_hostname": target.host} if target.secure else {}
        self._client = httpx.AsyncClient(
            base_url=url.copy_with(host=host.strip("[]"), port=target.port),
            headers=headers,
            follow_redirects=False,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None
    ) -> tuple[int, Any]:
        """Send a request; gives the status and the JSON of the reply.

        Raises:
            OperationTimeout: It did not answer in time.
            UpstreamError: It cannot be reached, or what it answers is too large or no JSON.
        """
        content = None if body is None else orjson.dumps(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        if (traceparent := CURRENT.get()) is not None:
            headers["traceparent"] = traceparent
        request = self._client.build_request(
            method, path.lstrip("/"), content=content, headers=headers, extensions=self._extensions
        )
        try:
            async with asyncio.timeout(timeout):
                status, reply = await self._exchange(request)
        except TimeoutError as error:
            raise OperationTimeout(f"{self._target.url} did not answer in {timeout:g} s") from error
        except httpx.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise UpstreamError(f"{self._target.url} cannot be reached: {detail}") from error
        if not reply:
            return status, None
        try:
            return status, orjson.loads(reply)
        except orjson.JSONDecodeError as error:
            if status >= 400:
                # Frameworks refuse with pages for people; the status says it all.
                return status, None
            raise UpstreamError(
                f"{method} {path} answered {status} with something that is not JSON"
            ) from error

    async def _exchange(self, request: httpx.Request) -> tuple[int, bytes]:
        response = await self._client.send(request, stream=True)
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

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def detail_of(reply: Any) -> str:
    """What an error reply says, in a line."""
    if isinstance(reply, dict):
        for name in ("detail", "message", "error"):
            if isinstance(reply.get(name), str):
                return str(reply[name])[:_MAX_DETAIL]
    return str(reply)[:_MAX_DETAIL]
