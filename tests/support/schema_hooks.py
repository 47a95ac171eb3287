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
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Name environments that are there, most of the time.

    Drawn names are never those of environments, so that without this nothing behind a 404 would be looked at. It hides
    nothing: what is no name, and every fourth name, stays as it was drawn, and the answer to those is held against the
    document like any other.
    """
    if path_parameters and "env_id" in path_parameters:
        env_id = path_parameters["env_id"]
        return {**path_parameters, "env_id": _known(env_id)}
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The same for bodies; and three sessions at once stand for 1,024, which are a minute's work in child processes.

    Numbers that are not allowed stay as they were drawn, and a whole float stays a float. The largest number that is
    allowed has a test of its own: `test_call_routes.py`.
    """
    if not isinstance(body, dict):
        return body
    if "env_id" in body and "url" not in body:
        body["env_id"] = _known(body["env_id"])
    count = body.get("count")
    if type(count) in (int, float) and count == int(count) and 1 <= count <= 1024:
        body["count"] = type(count)(1 + count % _MOST_SESSIONS)
    return body


def _known(env_id: Any) -> Any:
    """One of the environments that are served, in place of most valid names."""
    if type(env_id) is not str or re.fullmatch(IDENTIFIER, env_id) is None or len(env_id) % 4 == 0:
        return env_id
    return ENV_IDS[len(env_id) % len(ENV_IDS)]


@schemathesis.serializer(MSGPACK)
def as_msgpack(context: Any, value: Any) -> bytes:
    """Write bodies as MessagePack.

    It has no integers of more than 64 bits, so the next one that it has is sent, which lies on the same side of every
    bound in the document.
    """
    content: bytes = msgpack.packb(_in_64_bits(value))
    return content


def _in_64_bits(value: Any) -> Any:
    if type(value) is int:
        return min(max(value, -(2**63)), 2**64 - 1)
    if isinstance(value, dict):
        return {key: _in_64_bits(part) for key, part in value.items()}
    return [_in_64_bits(part) for part in value] if isinstance(value, list) else value


@schemathesis.deserializer(MSGPACK)
def from_msgpack(context: Any, response: requests.Response) -> Any:
    """Read answers in MessagePack, so that they are held against the schemas, too."""
    return msgpack.unpackb(response.content)
