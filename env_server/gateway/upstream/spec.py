"""Reading what a registered server says of its environment: the fields of an `EnvInfo`, all of them optional."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clients.protocol.arrays import DecodeError
from clients.protocol.spaces import UnicodeText, describe_space, parse_space
from env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from env_server.common.configuration import ConfigurationError
from env_server.gateway.upstream.base import EnvironmentSpec, UpstreamError

_TEXT = describe_space(UnicodeText())


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
        UpstreamError: A field is not what it should be.
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
