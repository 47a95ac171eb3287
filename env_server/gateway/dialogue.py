"""One socket to a registered server on which every message is answered before the next is sent."""

import asyncio
import contextlib
from urllib.parse import urlsplit, urlunsplit

from clients.protocol.errors import ProblemError
from clients.transport import ConnectionLost, WebSocket, open_socket
from env_server.gateway.targets import Target
from env_server.gateway.upstream import UpstreamError
from env_server.workers.base import OperationTimeout

_CONNECT_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_SCHEMES = {"http": "ws", "https": "wss"}


class Dialogue:
    """Questions and answers without ids.

    An answer that comes too late could be taken for that to the next question, so a question that is given up ends the
    socket. Made by `open`.
    """

    def __init__(self, url: str, connection: WebSocket) -> None:
        self._url = url
        self._connection = connection
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_asked = False
        connection.on_message = self._take
        connection.closed.add_done_callback(lambda _: self._messages.put_nowait(None))

    @classmethod
    async def open(
        cls, target: Target, path: str, token: str | None, max_message_bytes: int, *, timeout: float | None
    ) -> "Dialogue":
        """Open a socket, to the address of the target that was checked. Redirects are not followed.

        Raises:
            UpstreamError: It cannot be opened.
        """
        url = socket_url(target, path)
        try:
            connection = await open_socket(
                url,
                headers={} if token is None else {"Authorization": f"Bearer {token}"},
                subprotocol=None,
                timeout_s=_CONNECT_TIMEOUT_S if timeout is None else min(timeout, _CONNECT_TIMEOUT_S),
                address=target.address,
                max_message_bytes=max_message_bytes,
            )
        except (ConnectionError, ProblemError) as error:
            raise UpstreamError(f"{url} cannot be opened: {error}") from error
        return cls(url, connection)

    async def ask(self, message: bytes, *, timeout: float | None) -> bytes:
        """Send a message and wait for its answer.

        Raises:
            OperationTimeout: None came in time.
            UpstreamError: The socket has ended, or something came that was not asked for.
        """
        if self._has_asked and not self._messages.empty() and not self._connection.closed.done():
            self.abort()
            raise UpstreamError(f"{self._url} has said something that it was not asked")
        self._has_asked = True
        # A server that refuses a session says so and ends the socket, maybe before it is asked anything.
        with contextlib.suppress(ConnectionLost):
            self._connection.send(message, binary=False)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._messages.get()
        except TimeoutError as error:
            self.abort()
            raise OperationTimeout(f"{self._url} did not answer in {timeout:g} s") from error
        except BaseException:
            self.abort()
            raise
        if answer is None:
            self._messages.put_nowait(None)
            raise UpstreamError(f"{self._url} ended the socket: {await self._connection.closed}")
        return answer

    async def close(self, goodbye: bytes) -> None:
        """Say goodbye, and wait until the server has ended the socket: only then is the session's place free."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send(goodbye, binary=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._connection.closed), _GOODBYE_TIMEOUT_S)
        self.abort()

    def abort(self) -> None:
        """End the socket at once."""
        self._connection.abort()

    def _take(self, message: bytes) -> None:
        if not self._messages.empty():
            # Whoever keeps on talking must not fill the memory.
            self.abort()
            return
        self._messages.put_nowait(message)


def socket_url(target: Target, path: str) -> str:
    """The address of a socket of a target."""
    parts = urlsplit(target.url)
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, parts.path + path, "", ""))
