"""One socket to a registered server on which every message is answered before the next is sent."""

import asyncio
import contextlib
from urllib.parse import urlsplit, urlunsplit

from clients.net.transport import ConnectionLost, WebSocket, open_socket
from clients.protocol.errors import ProblemError
from env_server.gateway.upstream.base import UpstreamError
from env_server.gateway.upstream.targets import Target
from env_server.workers.base import OperationTimeout

_CONNECT_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_SCHEMES = {"http": "ws", "https": "wss"}


class Dialogue:
    """Questions and answers without ids.

    An answer that comes too late could be taken for that to the next question, so a question that is given up ends the
    socket. Made by `open`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: WebSocket | None = None
        self._has_asked = False
        self._early: bytes | None = None
        self._waiting: asyncio.Future[bytes] | None = None
        self._trouble: str | None = None

    @classmethod
    async def open(
        cls, target: Target, path: str, token: str | None, max_message_bytes: int, *, timeout: float | None
    ) -> "Dialogue":
        """Open a socket, to the address of the target that was checked. Redirects are not followed.

        Raises:
            UpstreamError: It cannot be opened.
        """
        dialogue = cls(socket_url(target, path))
        try:
            connection = await open_socket(
                dialogue._url,
                headers={} if token is None else {"Authorization": f"Bearer {token}"},
                subprotocol=None,
                timeout_s=_CONNECT_TIMEOUT_S if timeout is None else min(timeout, _CONNECT_TIMEOUT_S),
                address=target.address,
                max_message_bytes=max_message_bytes,
                on_message=dialogue._take,
            )
        except (ConnectionError, ProblemError) as error:
            raise UpstreamError(f"{dialogue._url} cannot be opened: {error}") from error
        dialogue._connection = connection
        connection.closed.add_done_callback(dialogue._ended)
        return dialogue

    async def ask(self, message: bytes, *, timeout: float | None) -> bytes:
        """Send a message and wait for its answer.

        Raises:
            OperationTimeout: None came in time.
            UpstreamError: The socket has ended, or something came that was not asked for.
        """
        self._has_asked = True
        early, self._early = self._early, None
        if early is not None:
            return early
        if self._trouble is not None:
            raise UpstreamError(self._trouble)
        assert self._connection is not None
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        try:
            self._connection.send(message, binary=False)
            async with asyncio.timeout(timeout):
                return await waiting
        except ConnectionLost as error:
            raise UpstreamError(f"{self._url} ended the socket: {error}") from error
        except TimeoutError as error:
            self.abort()
            raise OperationTimeout(f"{self._url} did not answer in {timeout:g} s") from error
        except BaseException:
            self.abort()
            raise

    async def close(self, goodbye: bytes) -> None:
        """Say goodbye, and wait until the server has ended the socket: only then is the session's place free."""
        assert self._connection is not None
        with contextlib.suppress(ConnectionLost):
            self._connection.send(goodbye, binary=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._connection.closed), _GOODBYE_TIMEOUT_S)
        self.abort()

    def abort(self) -> None:
        """End the socket at once."""
        if self._connection is not None:
            self._connection.abort()

    def _take(self, message: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(message)
        elif not self._has_asked and self._early is None:
            # A server that refuses a session says so before it is asked anything, and ends the socket.
            self._early = message
        else:
            self._trouble = f"{self._url} has said something that it was not asked"
            self.abort()

    def _ended(self, closed: "asyncio.Future[str]") -> None:
        if self._trouble is None:
            self._trouble = f"{self._url} ended the socket: {closed.result()}"
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(UpstreamError(self._trouble))


def socket_url(target: Target, path: str) -> str:
    """The address of a socket of a target."""
    parts = urlsplit(target.url)
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, parts.path + path, "", ""))
