"""What servers that are registered with a gateway may speak: each protocol is declared once.

A registration names one. A gateway accepts ours, and those that packages add where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticKnownError, core_schema

from rollgym.extensions import Capabilities

GROUP = "rollgym.upstream_protocols"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamProtocol:
    """A protocol that registered servers speak.

    Attributes:
        name: What registrations call it.
        speakers: The servers that speak it: its row in the documentation.
        upstream: `module:Class` of how a gateway speaks it, a subclass of `Upstream`
            (`rollgym.env_server.gateway.upstream.base`); a gateway imports it for the first such server.
        reads: Which of `OPTIONAL_FIELDS` it reads in a registration; it is refused with the others.
        free_ids: Whether its servers may have ids of environments that ours could not have.
    """

    name: str
    speakers: str
    upstream: str
    reads: frozenset[str] = frozenset()
    free_ids: bool = False


OPTIONAL_FIELDS = ("action_field", "observation_field")
"""The fields of a registration that not every protocol reads."""

ROLLGYM = UpstreamProtocol(
    name="rollgym",
    speakers="every `roll-serve`, other gateways included",
    upstream="rollgym.env_server.gateway.upstream.rollgym:RollgymUpstream",
)
OPENENV = UpstreamProtocol(
    name="openenv",
    speakers="existing servers of OpenEnv",
    upstream="rollgym.env_server.gateway.upstream.openenv:OpenEnvUpstream",
    reads=frozenset(OPTIONAL_FIELDS),
)
GEM = UpstreamProtocol(
    name="gem",
    speakers="existing servers of GEM's environments",
    upstream="rollgym.env_server.gateway.upstream.gem:GemUpstream",
    free_ids=True,
)
HTTP = UpstreamProtocol(
    name="http",
    speakers="an environment that you write, in any language",
    upstream="rollgym.env_server.gateway.upstream.http:HttpUpstream",
)
OURS = (ROLLGYM, OPENENV, GEM, HTTP)
"""Those that ship."""

UPSTREAM_PROTOCOLS = Capabilities("upstream protocol", GROUP, UpstreamProtocol, OURS)
"""All protocols by name."""


class _IsAName:
    """What a field that names a protocol accepts, and its schema, which lists the names of this installation."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _checked, serialization=core_schema.simple_ser_schema("str")
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(UPSTREAM_PROTOCOLS), "type": "string"}


ProtocolName = Annotated[str, _IsAName()]
"""The name of a protocol that there is."""


def _checked(value: Any) -> str:
    if isinstance(value, str) and value in UPSTREAM_PROTOCOLS:
        return value
    *names, last = map(repr, UPSTREAM_PROTOCOLS)
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
