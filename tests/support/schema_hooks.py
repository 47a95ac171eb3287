"""What Schemathesis needs to know of this server beyond its OpenAPI document; loaded by `SCHEMATHESIS_HOOKS`."""

import os
import re
from typing import Any

import msgpack
import requests
import schemathesis

from rollgym.clients.protocol.messages import IDENTIFIER

MSGPACK = "application/msgpack"
ENV_IDS = os.environ.get("SCHEMA_ENV_IDS", "Count").split(",")
_MOST_SESSIONS = 3


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Rewrite what Schemathesis translates wrongly: it makes `prefixItems` the list `items` of older drafts."""
    _without_prefix_items(raw_schema)


def _without_prefix_items(value: Any) -> None:
    if isinstance(value, dict):
        if "prefixItems" in value:
            value["items"] = {"anyOf": value.pop("prefixItems")}
        for part in value.values():
            _without_prefix_items(part)
    elif isinstance(value, list):
        for part in value:
            _without_prefix_items(part)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Name environments that are there, most of the time."""
    if path_parameters and "env_id" in path_parameters:
        env_id = path_parameters["env_id"]
        return {**path_parameters, "env_id": _known(env_id)}
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The same for bodies; numbers are written as this protocol has them, and no request makes 1,024 sessions."""
    body = _plain_numbers(body)
    if not isinstance(body, dict):
        return body
    if "env_id" in body and "url" not in body:
        body["env_id"] = _known(body["env_id"])
    if type(body.get("count")) is int and 1 <= body["count"] <= 1024:
        body["count"] = 1 + body["count"] % _MOST_SESSIONS
    return body


def _plain_numbers(value: Any) -> Any:
    """Integers below 2**53, as such; to JSON Schema, 1.0 is one, too."""
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if type(value) is int and abs(value) >= 2**53:
        return float(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(part) for key, part in value.items()}
    return [_plain_numbers(part) for part in value] if isinstance(value, list) else value


def _known(env_id: Any) -> Any:
    """One of the environments that are served, in place of most valid names."""
    if type(env_id) is not str or re.fullmatch(IDENTIFIER, env_id) is None or len(env_id) % 4 == 0:
        return env_id
    return ENV_IDS[len(env_id) % len(ENV_IDS)]


@schemathesis.serializer(MSGPACK)
def as_msgpack(context: Any, value: Any) -> bytes:
    """Write bodies as MessagePack."""
    content: bytes = msgpack.packb(value)
    return content


@schemathesis.deserializer(MSGPACK)
def from_msgpack(context: Any, response: requests.Response) -> Any:
    """Read answers in MessagePack, so that they are held against the schemas, too."""
    return msgpack.unpackb(response.content)
