"""An interactive session with a program in another machine's sandbox, over a WebSocket."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from rollgym.sandbox.core.base import SandboxSession, SandboxUnavailableError
from rollgym.sandbox.core.result import Outcome, RunResult
from rollgym.sandbox.core.uploads import EndedSession, too_large
from rollgym.sandbox.remote.run_code import read_reply

_CONNECT_S = 10.0
_ANSWER_S = 60.0
_PIECE = 256 * 1024


class RemoteSession:
    """See `SandboxSession`; one thread at a time may use it. The server ends the program when the socket drops.

    Args:
        connection: To the server.
        close: Closes it.
        wall_seconds: After which the program has ended in any case.
    """

    def __init__(self, connection: ClientConnection, close: Callable[[], None], wall_seconds: float) -> None:
        self._connection = connection
        self._close = close
        self._ends_at = time.monotonic() + wall_seconds
        self._result: RunResult | None = None
        self._refused_size = False

    def begin(self, request: Mapping[str, Any], largest: Callable[[], float]) -> str | None:
        """Start the program; return the reason if it was refused.

        A server closes the socket on a message that is far too large, while most of it is still in flight. Its reason
        may be lost then, and is requested separately.

        Args:
            request: The request for the run.
            largest: Returns the largest request that the server accepts, in bytes.

        Raises:
            UploadRefusedError: The server accepts no request of that size.
        """
        message = json.dumps(request)
        answer = self._ask(message)
        if answer is None and not self._refused_size:
            self._refused_size = len(message) > largest()
        if isinstance(answer, dict) and "ok" in answer:
            return None
        problem = answer.get("error") if isinstance(answer, dict) else None
        if self._refused_size or (isinstance(problem, dict) and problem.get("code") == "too_large"):
            raise UploadRefusedError(
                _reason(answer) if problem else "its setting max_request_bytes bounds it"
            )
        return _reason(answer)

    def write(self, data: bytes) -> None:
        """Write to its standard input; see `SandboxSession`."""
        for begin in range(0, len(data), _PIECE):
            answer = self._ask(data[begin : begin + _PIECE])
            if not isinstance(answer, dict) or "ok" not in answer:
                raise BrokenPipeError(_reason(answer))

    def read(self, timeout_seconds: float) -> bytes:
        """Return the new output; see `SandboxSession`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._ask(json.dumps({"op": "read", "timeout_s": left}))
            # The server waits for some seconds at most.
            if not isinstance(answer, bytes) or answer or time.monotonic() >= deadline or not self.alive:
                return answer if isinstance(answer, bytes) else b""

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""
        if self._result is not None:
            return False
        answer = self._ask(json.dumps({"op": "alive"}))
        return isinstance(answer, dict) and bool(answer.get("ok", {}).get("alive"))

    def close(self) -> RunResult:
        """End the program; see `SandboxSession`."""
        if self._result is None:
            answer = self._ask(json.dumps({"op": "close"}))
            if self._result is None:
                try:
                    self._result = read_reply(answer["ok"] if isinstance(answer, dict) else None)
                except (KeyError, ValueError):
                    self._lose(_reason(answer))
            self._close()
        assert self._result is not None
        return self._result

    def _ask(self, message: str | bytes) -> Any:
        """Send a message; return the answer, as bytes or as an object, or None if the server is gone."""
        if self._result is not None:
            return None
        patience_s = max(0.0, self._ends_at - time.monotonic()) + _ANSWER_S
        try:
            self._connection.send(message)
            answer = self._connection.recv(timeout=patience_s)
        except (ConnectionClosed, TimeoutError) as error:
            closed = error.rcvd if isinstance(error, ConnectionClosed) else None
            self._refused_size = closed is not None and closed.code == CloseCode.MESSAGE_TOO_BIG
            self._lose(str(error) or "the server does not answer")
            return None
        return answer if isinstance(answer, bytes) else json.loads(answer)

    def _lose(self, reason: str) -> None:
        self._result = RunResult(
            outcome=Outcome.SANDBOX_ERROR, detail=f"the connection to the sandbox broke: {reason}"
        )
        self._close()


class UploadRefusedError(Exception):
    """The server takes no request as large as this one."""


def open_remote_session(
    url: str,
    headers: Mapping[str, str],
    request: Mapping[str, Any],
    wall_seconds: float,
    largest: Callable[[], float],
) -> SandboxSession:
    """Start an interactive session with a program.

    Args:
        url: The server's address.
        headers: Headers of the handshake.
        request: The request for the run.
        wall_seconds: The time after which the program has ended in any case.
        largest: Asks the server how many bytes it takes at once.

    Raises:
        SandboxUnavailableError: If it cannot be started.
    """
    parts = urlsplit(url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    address = urlunsplit((scheme, parts.netloc, f"{parts.path}/v1/sandbox/session", "", ""))
    stack = ExitStack()
    try:
        connection = stack.enter_context(
            connect(
                address,
                additional_headers=dict(headers),
                open_timeout=_CONNECT_S,
                # A program may be left alone for minutes while a model thinks.
                ping_interval=None,
                compression=None,
                max_size=None,
            )
        )
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise SandboxUnavailableError(f"remote: {address}: {error}") from error
    session = RemoteSession(connection, stack.close, wall_seconds)
    try:
        refusal = session.begin(request, largest)
    except UploadRefusedError as error:
        stack.close()
        return EndedSession(too_large(f"{address}: {error}"))
    except BaseException:
        # No other code holds this session, and the program would live as long as its socket.
        stack.close()
        raise
    if refusal is not None:
        stack.close()
        raise SandboxUnavailableError(f"remote: {address}: {refusal}")
    return session


def _reason(answer: Any) -> str:
    problem = answer.get("error") if isinstance(answer, dict) else None
    return str(problem["detail"]) if isinstance(problem, dict) and "detail" in problem else "no answer came"
