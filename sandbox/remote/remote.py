"""Another machine's sandbox: a server that answers `POST /run_code`, and holds sessions over a WebSocket."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from rollgym.sandbox.core.base import (
    Guarantees,
    Outcome,
    Program,
    RunResult,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.probe import probe_sandbox
from rollgym.sandbox.core.uploads import EndedSession, refused, too_large
from rollgym.sandbox.remote.run_code import SandboxReply, build_request, read_guarantees, read_reply
from rollgym.sandbox.supervisor.files import plain_names

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


def _open_remote_session(
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


# A run waits for its turn at the server, and its answer for the network.
_MARGIN_S = 60.0
_NOT_BEGUN = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_TOO_LARGE = 413
_READ_AT_ONCE = 2**16
"""Bytes that have left here before a server can refuse them: its answer is never lost over a smaller request."""
_JSON = {"Content-Type": "application/json"}
# 408: the request stood still on its way and did not arrive whole, so that nothing was run.
_BUSY = frozenset({408, 429, 503})
_RETRY_S = 1.0
_LONGEST_RETRY_S = 10.0
_REMEDIES: Mapping[int, str] = {
    401: "give a token of that server (remote:URL?token_file=PATH)",
    403: "the token needs the role play",
    404: "that server runs no programs: start it with --sandbox",
    413: "its settings max_request_bytes and max_reply_bytes bound what is sent and answered",
}


class RemoteSandbox:
    """A back-end; see `Sandbox`.

    A run that was not begun is retried, and one that a full server refuses is retried after the server's delay. If a
    connection breaks while a program runs, the run is tried once more: a run leaves nothing behind.

    Args:
        url: The server's address.
        token: The bearer token.
        token_file: A file that holds the token, instead.
        patience_s: How long a run waits for a server that is away or has no room.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        patience_s: float = 60.0,
    ) -> None:
        if token_file is not None:
            try:
                token = Path(token_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise SandboxUnavailableError(f"the token of {url} cannot be read: {error}") from error
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._patience_s = patience_s
        # As many connections as calling threads; the server limits the number.
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = self._connect()
        self._seen: Guarantees | None = None
        self.claims: Guarantees

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
    ) -> RunResult:
        """Run a program to its end; see `Sandbox`."""
        if (result := refused(program, files, limits)) is not None:
            return result
        body = build_request(program, files, stdin, limits, plain_names(collect))
        seconds = limits.wall_seconds + limits.compile_seconds + self._patience_s + _MARGIN_S
        try:
            answer = self._ask("POST", "/run_code", body, seconds)
            return read_reply(answer)
        except _UploadTooLargeError as error:
            return too_large(f"the sandbox at {self._url}: {error}")
        except (_NotAnsweredError, ValueError) as error:
            return RunResult(outcome=Outcome.SANDBOX_ERROR, detail=f"the sandbox at {self._url}: {error}")

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        """Start an interactive session with a program; see `Sandbox`.

        Raises:
            SandboxUnavailableError: If it cannot be started.
        """
        if (result := refused(program, files, limits)) is not None:
            return EndedSession(result)
        body = build_request(program, files, b"", limits, ())
        return _open_remote_session(
            self._url, self._headers, body, limits.wall_seconds, self._largest_request
        )

    def probe(self) -> Guarantees:
        """Request the results of the server's own probe, and run a control program; see `Sandbox`."""
        if self._seen is None:
            try:
                told = SandboxReply.model_validate(self._ask("GET", "/v1/sandbox", None, _MARGIN_S))
                self.claims = read_guarantees(told.guarantees)
            except (_NotAnsweredError, ValueError) as error:
                raise SandboxUnavailableError(f"remote does not work here: {self._url}: {error}") from error
            self._seen = probe_sandbox(self)
        return self._seen

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return f"Look at the log of the server at {self._url}"

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()
        self._client = self._connect()

    def _connect(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, limits=self._limits)

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """Send a request, and retry it if that is safe.

        Raises:
            _NotAnsweredError: If no valid answer came.
        """
        content = None if body is None else json.dumps(body).encode()
        give_up_at = time.monotonic() + self._patience_s
        attempts_left = 2
        timeout = httpx.Timeout(seconds, connect=_CONNECT_S)
        while True:
            pause = _RETRY_S
            try:
                answer = self._client.request(
                    method, self._url + path, content=content, headers=_JSON, timeout=timeout
                )
            except _NOT_BEGUN as error:
                reason = f"it cannot be reached: {error}"
            except httpx.TimeoutException as error:
                raise _NotAnsweredError("it did not answer in time") from error
            except httpx.TransportError as error:
                attempts_left -= 1
                reason = f"the connection broke: {error}"
                size = len(content or b"")
                if size > _READ_AT_ONCE and size > (largest := self._largest_request()):
                    # It was refused while it was on its way, and the answer lost on that.
                    raise _UploadTooLargeError(
                        f"{size} bytes; {largest:.0f} are allowed; {_REMEDIES[_TOO_LARGE]}"
                    ) from error
                if attempts_left == 0:
                    raise _NotAnsweredError(reason) from error
                # This program may have crashed the server: it is not retried for ever.
                continue
            else:
                if answer.status_code == 200:
                    return _content(answer)
                reason = _explain(answer)
                if answer.status_code == _TOO_LARGE and _limit(answer) < len(content or b""):
                    raise _UploadTooLargeError(reason)
                if answer.status_code not in _BUSY:
                    raise _NotAnsweredError(reason)
                with contextlib.suppress(ValueError):
                    pause = float(answer.headers.get("retry-after", pause))
            pause = min(pause, _LONGEST_RETRY_S)
            if time.monotonic() + pause > give_up_at:
                raise _NotAnsweredError(reason)
            time.sleep(pause)

    def _largest_request(self) -> float:
        """The largest request that the server accepts, in bytes; infinite if the server does not say."""
        try:
            answer = self._client.get(f"{self._url}/v1/info", timeout=_CONNECT_S)
            return float(answer.json()["limits"]["max_request_bytes"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return math.inf


class _NotAnsweredError(Exception):
    """No valid answer came; the text says why."""


class _UploadTooLargeError(_NotAnsweredError):
    """The server takes no request as large."""


def _content(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise _NotAnsweredError("it answered something that is no JSON") from error


def _limit(answer: httpx.Response) -> float:
    """Return the size limit that a refusal names; if it names none, the size of this request."""
    try:
        return float(answer.json().get("limit", 0))
    except (ValueError, TypeError, AttributeError):
        return 0.0


def _explain(answer: httpx.Response) -> str:
    try:
        told = answer.json()
        detail = str(told["detail"])
    except (ValueError, KeyError, TypeError):
        detail = "no reason was given"
    remedy = _REMEDIES.get(answer.status_code)
    return f"HTTP {answer.status_code}: {detail}" + (f"; {remedy}" if remedy else "")
