"""The protocol `openenv`: one WebSocket to an OpenEnv server is one session, one message at a time.

Its messages are made and read as one of its clients does, without I/O.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import orjson

from rollgym.clients.net.connection import ConnectionLost, WebSocket, open_socket
from rollgym.clients.protocol import json_text as exact_json
from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.clients.protocol.upstream_protocols import OPENENV
from rollgym.clients.protocol.values import encode_value
from rollgym.env_server.gateway.upstream.base import (
    Endpoint,
    EnvironmentSpec,
    SessionUnknownError,
    Upstream,
    UpstreamError,
    as_text,
    read_foreign_info,
    read_json,
)
from rollgym.env_server.gateway.upstream.http_client import TargetClient, detail_of
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout, Spaces, StepOutcome

_NOT_OBSERVED = frozenset({"done", "reward", "metadata"})
_MAX_MESSAGE = 1000
# The classes of OpenEnv's MCP environments. Their text is the JSON of the whole: an action is a tool's name and its
# arguments, and no observation of a reset has the fields that the schema of a call's observation requires.
_MCP_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
_MCP_OBSERVATIONS = frozenset({"CallToolObservation", "ListToolsObservation"})
_TRUNCATED = ("truncated", "TimeLimit.truncated")

WHOLE = "."
"""The name in a registration, in place of a field, for texts that are the JSON of the whole object."""

_STATE = dumps({"type": "state"}, binary=False)
_CLOSE = dumps({"type": "close"}, binary=False)
_CONNECT_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_SCHEMES = {"http": "ws", "https": "wss"}
_SPEC_TIMEOUT_S = 20.0
_FULL_RETRY_S = 5
_OF_THE_ENVIRONMENT = frozenset({"EXECUTION_ERROR", "VALIDATION_ERROR", "FACTORY_ERROR"})
_Answer = TypeVar("_Answer")


class OpenEnvRefused(Exception):  # noqa: N818 - the name says what happened
    """The server answered with an error.

    Args:
        code: One of OpenEnv's.
        message: The server's message.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class OpenEnvMessages:
    """Builds messages to one environment and reads its answers.

    Attributes:
        action_field: The field of an action that a text is for; None if a text is the JSON of a whole action.
        action_is_text: Whether that field takes a text as it is; the text is the field's JSON otherwise.
        observation_field: The field of a step's observation that is the text; None if that is the observation's JSON.
        reset_field: The same of a reset's observation.
        is_named: Whether the registration names that field. One that is only guessed from the schema may be missing in
            an observation: OpenEnv checks no observation against its schema.
    """

    action_field: str | None
    action_is_text: bool
    observation_field: str | None
    reset_field: str | None
    is_named: bool = False

    @classmethod
    def of(
        cls, schemas: Mapping[str, Any], action_field: str | None, observation_field: str | None
    ) -> "OpenEnvMessages":
        """The messages that fit an environment's schemas.

        Without a name, a text is for the one field that an action must have (or the only one that it may have), and the
        text of an observation is its one field of text. If no such field exists, the text is the JSON of the whole
        object.

        Args:
            schemas: The server's answer to `GET /schema`.
            action_field: The field that the registration names; `WHOLE` for the JSON of all.
            observation_field: Likewise.

        Raises:
            UpstreamError: The schemas cannot be read, or have no such field.
        """
        action, observation = _object_schema("action", schemas), _object_schema("observation", schemas)
        begin = _object_schema("reset_observation", {"reset_observation": observation, **schemas})
        field = _action_field(action, action_field)
        return cls(
            field,
            field is not None and _takes_text(_properties(action).get(field), action),
            _observed_field("observation", observation, observation_field),
            _observed_field("reset_observation", begin, observation_field),
            observation_field is not None,
        )

    def reset(self, seed: int | None, parameters: Mapping[str, Any]) -> bytes:
        """The message that begins an episode."""
        data = dict(parameters)
        if seed is not None:
            data["seed"] = seed
        return dumps({"type": "reset", "data": data}, binary=False)

    def step(self, text: str) -> bytes:
        """The message that takes a text as an action.

        A text that should be JSON but is not goes unchanged: the environment judges it.
        """
        if not self.action_is_text:
            # A text that is nested too deeply to be encoded again goes unchanged, too.
            with suppress(orjson.JSONDecodeError, EncodeError):
                return self._step(exact_json.read_json(text))
        return self._step(text)

    def _step(self, value: Any) -> bytes:
        data = value if self.action_field is None else {self.action_field: value}
        try:
            return exact_json.write_json({"type": "step", "data": data})
        except (TypeError, ValueError) as error:
            raise EncodeError(f"an action cannot be written as JSON: {error}") from error

    def read_reset(self, answer: bytes) -> tuple[str, Mapping[str, Any]]:
        """The observation and the info of an answer to a reset.

        Raises:
            OpenEnvRefused: It is an error.
            UpstreamError: It cannot be read.
        """
        # If only a step's observation has the field, a reset's text is the JSON of its observation.
        text, info, _ = _read(answer, self.reset_field, must_have=False)
        return text, info

    def read_step(self, answer: bytes) -> StepOutcome:
        """Parse the answer to a step. Raises like `read_reset`."""
        text, info, data = _read(answer, self.observation_field, must_have=self.is_named)
        done, reward = data.get("done"), data.get("reward")
        if type(done) is not bool:
            raise UpstreamError("done of a step is no boolean")
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise UpstreamError("the reward is not a finite number")
        metadata = info.get("metadata", {})
        truncated = done and any(metadata.get(name) is True for name in _TRUNCATED)
        terminated = done and (not truncated or metadata.get("terminated") is True)
        return StepOutcome(text, float(reward or 0.0), terminated, truncated, info)


def read_data(answer: bytes) -> dict[str, Any]:
    """Return the data of an answer.

    Raises:
        OpenEnvRefused: It is an error.
        UpstreamError: It cannot be read.
    """
    try:
        message = read_json(answer)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("an answer is no JSON") from error
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise UpstreamError("an answer is no object with data")
    if message.get("type") == "error":
        raise OpenEnvRefused(str(data.get("code", "")), _message(data))
    return data


def _message(data: Mapping[str, Any]) -> str:
    """The message of an error, and the fields that it concerns."""
    parts = [str(data.get("message", ""))]
    errors = data.get("errors")
    for error in errors if isinstance(errors, list) else []:
        if isinstance(error, dict):
            place = error.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            parts.append(f"{where}: {error.get('msg', '')}")
    return "; ".join(parts)[:_MAX_MESSAGE]


def _read(
    answer: bytes, field: str | None, *, must_have: bool
) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """The text, the info and all else of an answer with an observation.

    Args:
        answer: The answer.
        field: The field that is the text, or None for the JSON of all.
        must_have: Whether an observation without that field cannot be used; its text is the JSON of all otherwise.
    """
    data = read_data(answer)
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise UpstreamError("there is no observation in the answer")
    metadata: dict[str, Any] = {}
    for given in (observation.get("metadata"), data.get("metadata")):
        if isinstance(given, dict):
            metadata |= given
    info = {name: value for name, value in observation.items() if name not in _NOT_OBSERVED}
    if field is not None and field in observation:
        text = "" if observation[field] is None else as_text(observation[field])
        info.pop(field, None)
    elif must_have and field is not None:
        raise UpstreamError(f"there is no {field!r} in the observation")
    else:
        # OpenEnv's MCP environments say how an episode begins in the metadata, and nowhere else.
        text = as_text(info or metadata)
    own = info.get("info")
    if isinstance(own, dict):
        del info["info"]
        info |= own
    if metadata:
        info["metadata"] = metadata
    return text, read_foreign_info(info), data


def _object_schema(name: str, schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = schemas.get(name)
    if not isinstance(schema, dict):
        raise UpstreamError(f"there is no schema of the {name}")
    return schema


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that a schema lists; empty if it is a choice between several objects."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _check_field(name: str, schema: Mapping[str, Any], field: str) -> None:
    properties = _properties(schema)
    # A schema without a list of fields allows any.
    if properties and field not in properties:
        raise UpstreamError(f"the {name} has no field {field!r}: it has {', '.join(sorted(properties))}")


def _action_field(schema: Mapping[str, Any], named: str | None) -> str | None:
    if named == WHOLE:
        return None
    if named is not None:
        _check_field("action", schema, named)
        return named
    if schema.get("title") in _MCP_ACTIONS:
        return None
    return _only_field(schema, [field for field in _properties(schema) if field != "metadata"])


def _observed_field(name: str, schema: Mapping[str, Any], named: str | None) -> str | None:
    if named == WHOLE:
        return None
    if named is not None:
        _check_field(name, schema, named)
        return named
    if schema.get("title") in _MCP_OBSERVATIONS:
        return None
    texts = [
        field
        for field, each in _properties(schema).items()
        if field not in _NOT_OBSERVED and _takes_text(each, schema)
    ]
    return _only_field(schema, texts)


def _only_field(schema: Mapping[str, Any], fields: list[str]) -> str | None:
    """The one of these fields that is required, or else the only one; None if there are several, or none."""
    required = schema.get("required")
    found = [field for field in fields if isinstance(required, list) and field in required]
    return next((each[0] for each in (found, fields) if len(each) == 1), None)


def _takes_text(field: Any, schema: Mapping[str, Any]) -> bool:
    return any(each.get("type") == "string" for each in _alternatives(field, schema))


def _alternatives(field: Any, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that a field may fit, with references to definitions followed (once, as pydantic writes them)."""
    if not isinstance(field, dict):
        return
    reference = field.get("$ref")
    if isinstance(reference, str):
        definitions = schema.get("$defs")
        field = definitions.get(reference.removeprefix("#/$defs/")) if isinstance(definitions, dict) else None
        if not isinstance(field, dict):
            return
    choices = field.get("anyOf", field.get("oneOf"))
    for each in choices if isinstance(choices, list) else [field]:
        if isinstance(each, dict):
            yield each


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
        dialogue = cls(_socket_url(target, path))
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


def _socket_url(target: Target, path: str) -> str:
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

    protocol = OPENENV.name
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

    @classmethod
    def connect(cls, endpoint: Endpoint) -> Self:
        """Make the client of a server for one environment."""
        named = endpoint.registration
        return cls(
            endpoint.target,
            endpoint.token,
            endpoint.limits,
            action_field=named.action_field,
            observation_field=named.observation_field,
        )

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
            read_data(await dialogue.ask(_STATE, timeout=timeout))
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
            await dialogue.close(_CLOSE)

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
