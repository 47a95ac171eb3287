"""Parsing of the specs and replies of registered servers, for all protocols."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollgym.clients.protocol import json_text as exact_json
from rollgym.clients.protocol.arrays import INTEGER_LIMIT, DecodeError
from rollgym.clients.protocol.spaces import UnicodeText, describe_space, parse_space
from rollgym.clients.protocol.values import decode_value
from rollgym.env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.upstream.base import EnvironmentSpec, UpstreamError

_MAX_DEPTH = 200
_TEXT = describe_space(UnicodeText())


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
    isolation: Literal["inline", "thread", "process"] = "process"
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
