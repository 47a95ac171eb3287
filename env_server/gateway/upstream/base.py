"""The interface of a registered server to a gateway, and parsing of its specs and replies, for all protocols."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import orjson
from gymnasium import Space
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollgym.clients.protocol import json_text as exact_json
from rollgym.clients.protocol.arrays import INTEGER_LIMIT, DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import Isolation, RegisterRequest
from rollgym.clients.protocol.spaces import UnicodeText, describe_space, parse_space
from rollgym.clients.protocol.values import decode_value
from rollgym.env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from rollgym.env_server.workers.base import EnvironmentRaised, Spaces, StepOutcome, Verdict

LATER = frozenset({429, 503})
"""The statuses of HTTP that say that nothing was done, and may be at another time."""

_MAX_DEPTH = 200
_TEXT = describe_space(UnicodeText())


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The description of a registered environment; by default, actions and observations are texts.

    Attributes:
        version: Episodes of another version are not restored.
        stateless: Whether it scores single responses.
        description: For lists.
        action_space: Of an environment made without kwargs.
        observation_space: Likewise.
        kwargs_schema: JSON Schema of the kwargs that a client may set.
        max_episode_steps: When it truncates.
        deterministic: Whether seed and actions rebuild the state.
        forkable: Whether a session may be copied.
        immediate: Whether steps are answered at once, so that none has to wait for another.
        metadata: Whatever else it says.
    """

    version: str = "0"
    stateless: bool = False
    description: str = ""
    action_space: Space[Any] = field(default_factory=UnicodeText)
    observation_space: Space[Any] = field(default_factory=UnicodeText)
    kwargs_schema: Mapping[str, Any] = field(default_factory=lambda: NO_KWARGS)
    max_episode_steps: int | None = None
    deterministic: bool = False
    forkable: bool = False
    immediate: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class UpstreamError(Exception):
    """A registered server failed: it cannot be reached, or its answer is too large or invalid.

    Args:
        message: A sentence about the failure.
        away: Whether it could not be reached.
        unsent: Whether it certainly has not begun the operation.
    """

    def __init__(self, message: str, *, away: bool = False, unsent: bool = False) -> None:
        super().__init__(message)
        self.away = away
        self.unsent = unsent


class SessionUnknownError(UpstreamError):
    """The server does not have the session any more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a protocol needs to speak to a server about one environment.

    Attributes:
        target: The server's address.
        registration: How it is registered.
        owner: The name of the token that registers it.
        limits: The largest reply, and the number of connections.
        nodes: The servers of ours at this gateway; registrations of one share its connections.
    """

    target: Target
    registration: RegisterRequest
    owner: str
    limits: TargetLimits
    nodes: Nodes

    @property
    def env_id(self) -> str:
        """The environment's id at the server."""
        return self.registration.upstream_env_id or self.registration.env_id

    @property
    def token(self) -> str | None:
        """The bearer token for the server."""
        return self.registration.token


class Upstream(ABC):
    """A registered environment on another server. Sessions are under keys that the gateway chose.

    Every call may raise `UpstreamError`; those that run the environment also raise `EnvironmentRaised`, if the server
    reports a failure of the environment, and `OperationTimeout`.

    Attributes:
        protocol: The protocol's name.
        node: The node that sessions are passed on to; None where the gateway holds the sessions.
        keeps_sessions: Whether the server keeps a session after a failed call.
        ends_with_its_calls: Whether a cancelled call leaves nothing at the server.
    """

    protocol: ClassVar[str]
    node: Node | None = None
    keeps_sessions: ClassVar[bool] = False
    ends_with_its_calls: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def connect(cls, endpoint: Endpoint) -> Self:
        """Make the client of a server for one environment; connections may wait for the first call."""

    @abstractmethod
    async def spec(self) -> EnvironmentSpec:
        """Request the server's description of the environment."""

    async def acquaint(self) -> str | None:
        """A sentence about the connections to the server, at the end of a probe; None if there is none."""
        return None

    @abstractmethod
    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Make a session; return its spaces.

        Raises:
            ProblemError: `at_capacity`, if the server has no room at present.
        """

    @abstractmethod
    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode; return the observation and the info."""

    @abstractmethod
    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the server's session."""

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render the state, if the protocol supports that."""
        raise EnvironmentRaised("NotImplementedError", f"the protocol {self.protocol} has no render")

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for the environment's random generator in mid-episode, if the protocol supports that."""
        raise ProblemError("fork_unsupported", "copies of this environment cannot be seeded anew")

    async def verify(self, items: Sequence[Mapping[str, Any]], *, timeout: float | None) -> list[Verdict]:
        """Score responses, in their order, if the protocol supports that."""
        raise EnvironmentRaised("NotImplementedError", f"the protocol {self.protocol} has no verify")

    @abstractmethod
    async def close(self, key: str) -> None:
        """End a session; ending one that does not exist is not an error."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Close all connections to the server."""


def read_number(name: str, reply: Mapping[str, Any]) -> float:
    """A finite number.

    Raises:
        UpstreamError: It is something else.
    """
    value = reply.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UpstreamError(f"the {name} is not a finite number")
    return float(value)


def read_info(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the info of a reply.

    Raises:
        UpstreamError: The info is not an object, or holds a value that cannot be read.
    """
    info = reply.get("info")
    if info is None:
        # Go and other languages write an empty mapping that was never made as null.
        return {}
    if not isinstance(info, dict):
        raise UpstreamError("the info is not an object")
    try:
        decoded: Mapping[str, Any] = decode_value(None, info)
    except DecodeError as error:
        raise UpstreamError(f"the info cannot be read: {error}") from error
    return decoded


def read_foreign_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info of a server that does not know our protocol's limits: larger integers, such as times in nanoseconds,
    become text.

    Raises:
        UpstreamError: It holds what cannot be read.
    """
    return read_info({"info": _within_limits(info, _MAX_DEPTH)})


def _within_limits(value: Any, depth: int) -> Any:
    if type(value) is int and not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        return str(value)
    if not depth:
        # Deeper values are refused in any case.
        return value
    if isinstance(value, dict):
        return {name: _within_limits(each, depth - 1) for name, each in value.items()}
    if isinstance(value, list):
        return [_within_limits(each, depth - 1) for each in value]
    return value


def read_json(content: bytes) -> Any:
    """Parse a server's text as JSON; refuse values that are nested too deeply to be encoded again.

    Raises:
        UpstreamError: It is nested too deeply.
        orjson.JSONDecodeError: It is not valid JSON.
    """
    if content.count(b"[") + content.count(b"{") > _MAX_DEPTH:
        try:
            orjson.dumps(orjson.loads(content))
        except orjson.JSONEncodeError as error:
            raise UpstreamError("a reply is nested too deeply") from error
    return exact_json.read_json(content)


def as_text(value: Any) -> str:
    """An observation as text; other values become their JSON."""
    if isinstance(value, str):
        return value
    return exact_json.write_json(value).decode()


class _SpecReply(BaseModel):
    model_config = ConfigDict(extra="ignore")

    version: str = Field("0", max_length=128)
    kind: Literal["episodic", "stateless"] = "episodic"
    description: str = Field("", max_length=4096)
    action_space: dict[str, Any] = Field(default_factory=lambda: _TEXT)
    observation_space: dict[str, Any] = Field(default_factory=lambda: _TEXT)
    kwargs_schema: dict[str, Any] = Field(default_factory=lambda: dict(NO_KWARGS))
    max_episode_steps: int | None = Field(None, ge=1)
    deterministic: bool = False
    forkable: bool | None = None
    isolation: Isolation = "process"
    metadata: dict[str, Any] = Field(default_factory=dict)


def read_spec(reply: dict[str, Any]) -> EnvironmentSpec:
    """Read a spec.

    Raises:
        UpstreamError: A field is invalid.
    """
    try:
        given = _SpecReply.model_validate(reply)
        KwargsRules("the environment", given.kwargs_schema, frozenset(), trusted=False)
        action_space, observation_space = map(parse_space, (given.action_space, given.observation_space))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UpstreamError(f"the spec's {place}: {first['msg']}") from error
    except (ConfigurationError, DecodeError) as error:
        raise UpstreamError(f"the spec cannot be used: {error}") from error
    return EnvironmentSpec(
        version=given.version,
        stateless=given.kind == "stateless",
        description=given.description,
        action_space=action_space,
        observation_space=observation_space,
        kwargs_schema=given.kwargs_schema,
        max_episode_steps=given.max_episode_steps,
        deterministic=given.deterministic,
        forkable=given.deterministic if given.forkable is None else given.forkable and given.deterministic,
        immediate=given.isolation == "inline",
        metadata=given.metadata,
    )
