"""The protocol `openenv`: one WebSocket to an OpenEnv server is one session, one message at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rollgym.clients.net.transport import ConnectionLost, WebSocket, open_socket
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import encode_value
from rollgym.env_server.gateway.upstream.base import (
    EnvironmentSpec,
    SessionUnknownError,
    Upstream,
    UpstreamError,
)
from rollgym.env_server.gateway.upstream.http_client import TargetClient, TargetLimits, detail_of
from rollgym.env_server.gateway.upstream.openenv_messages import (
    CLOSE,
    STATE,
    OpenEnvMessages,
    OpenEnvRefused,
    read_data,
)
from rollgym.env_server.gateway.upstream.targets import Target
from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout, Spaces, StepOutcome

_CONNECT_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_SCHEMES = {"http": "ws", "https": "wss"}
_SPEC_TIMEOUT_S = 20.0
_FULL_RETRY_S = 5
_OF_THE_ENVIRONMENT = frozenset({"EXECUTION_ERROR", "VALIDATION_ERROR", "FACTORY_ERROR"})
_Answer = TypeVar("_Answer")


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
            OperationTimeout: No answer came in time.
            UpstreamError: The socket has ended, or an unexpected message came.
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
            # A server that refuses a session says so before the first request, and closes the socket.
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


class OpenEnvUpstream(Upstream):
    """An environment of an OpenEnv server.

    Args:
        target: Its address.
        token: Bearer token.
        limits: The largest reply, and the number of connections.
        action_field: The field of an action that takes the text, if the schema leaves that open.
        observation_field: The field of an observation that holds the text, likewise.
    """

    protocol = "openenv"
    keeps_sessions = True
    ends_with_its_calls = True

    def __init__(
        self,
        target: Target,
        token: str | None,
        limits: TargetLimits,
        *,
        action_field: str | None = None,
        observation_field: str | None = None,
    ) -> None:
        self._target = target
        self._token = token
        self._limit = limits.max_reply_bytes
        self._fields = (action_field, observation_field)
        self._client = TargetClient(target, token, limits)
        self._spec = EnvironmentSpec()
        self._messages = OpenEnvMessages(None, False, None, None)
        self._sessions: dict[str, Dialogue] = {}
        self._kwargs: dict[str, Mapping[str, Any]] = {}

    async def spec(self) -> EnvironmentSpec:
        """The answers of `/schema` and `/metadata`."""
        schemas, metadata = await self._get("/schema"), await self._get("/metadata")
        self._messages = OpenEnvMessages.of(schemas, *self._fields)
        self._spec = EnvironmentSpec(
            version=str(metadata.get("version") or "0")[:128],
            description=str(metadata.get("description") or "")[:4096],
            kwargs_schema={"type": "object"},
            metadata={"openenv": {"name": metadata.get("name"), "action": schemas["action"]}},
        )
        return self._spec

    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Open a socket, and send a first request: its answer shows whether there is room for a session.

        Raises:
            ProblemError: `at_capacity`, if there is not.
        """
        dialogue = await Dialogue.open(self._target, "/ws", self._token, self._limit, timeout=timeout)
        try:
            read_data(await dialogue.ask(STATE, timeout=timeout))
        except OpenEnvRefused as refused:
            if refused.code != "EXECUTION_ERROR":
                dialogue.abort()
                if refused.code == "CAPACITY_REACHED":
                    raise ProblemError(
                        "at_capacity",
                        f"{self._target.url} has no room: {refused.message}",
                        retry_after=_FULL_RETRY_S,
                        limit="upstream",
                    ) from refused
                raise _failure(refused) from refused
            # The session exists, but cannot report its state.
        except BaseException:
            dialogue.abort()
            raise
        self._sessions[key] = dialogue
        self._kwargs[key] = encode_value(None, dict(kwargs), binary=False)
        return self._spec.action_space, self._spec.observation_space

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in the server's session."""
        parameters = {**self._kwargs.get(key, {}), **encode_value(None, options or {}, binary=False)}
        question = self._messages.reset(seed, parameters)
        try:
            return await self._ask(key, question, self._messages.read_reset, timeout)
        except OpenEnvRefused as refused:
            raise _failure(refused) from refused

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step. If the server refuses an action, its message is the answer, and the episode continues."""
        question = self._messages.step(action)
        try:
            return await self._ask(key, question, self._messages.read_step, timeout)
        except OpenEnvRefused as refused:
            if refused.code == "VALIDATION_ERROR":
                info = {"action_is_valid": False, "error": refused.message}
                return StepOutcome(f"Invalid action: {refused.message}", 0.0, False, False, info)
            raise _failure(refused) from refused

    async def close(self, key: str) -> None:
        """End a session at the server."""
        self._kwargs.pop(key, None)
        dialogue = self._sessions.pop(key, None)
        if dialogue is not None:
            await dialogue.close(CLOSE)

    async def shutdown(self) -> None:
        """Close all connections to the server."""
        await asyncio.gather(*(self.close(key) for key in list(self._sessions)))
        await self._client.close()

    async def _ask(
        self, key: str, question: bytes, read: Callable[[bytes], _Answer], timeout: float | None
    ) -> _Answer:
        dialogue = self._sessions.get(key)
        if dialogue is None:
            raise SessionUnknownError(f"there is no session for {key}")
        try:
            answer = await dialogue.ask(question, timeout=timeout)
        except UpstreamError as error:
            # The session has ended with its socket.
            del self._sessions[key]
            raise SessionUnknownError(str(error), away=error.away) from error
        return read(answer)

    async def _get(self, path: str) -> dict[str, Any]:
        status, reply = await self._client.call("GET", path, timeout=_SPEC_TIMEOUT_S)
        if status != 200:
            raise UpstreamError(f"GET {path} answered {status}: {detail_of(reply)}")
        if not isinstance(reply, dict):
            raise UpstreamError(f"GET {path} answered with {type(reply).__name__}, not with an object")
        return reply


def _failure(refused: OpenEnvRefused) -> Exception:
    """Map an error of the server to one of the gateway."""
    if refused.code in _OF_THE_ENVIRONMENT:
        return EnvironmentRaised(refused.code, refused.message)
    return UpstreamError(str(refused))
