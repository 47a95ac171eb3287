"""The ids of sessions at nodes: they name the owner and the node, so that any gateway can continue a session.

An id is `<kind><node><proof>.<id at the node>`. If a node is itself a gateway, the id there has the same form.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

from rollgym.env_server.gateway.upstream.node import NODE_KEY_CHARACTERS

_PROOF_BYTES = 10
_PROOF = 16
_LONGEST = 128
_PATTERN = re.compile(rf"([sh])([a-z2-7]{{{NODE_KEY_CHARACTERS}}})([a-z2-7]{{{_PROOF}}})\.([A-Za-z0-9._-]+)")


@dataclass(frozen=True, slots=True)
class SessionName:
    """The parts of a session's id.

    Attributes:
        lingers: Whether the session was made on a socket, and ends some time after its last one.
        node: The key of the node that has it.
        upstream_id: Its id there.
        proof: A signature that proves that the owner received the id.
    """

    lingers: bool
    node: str
    upstream_id: str
    proof: str

    def is_of(self, key: bytes) -> bool:
        """Whether it was given to the owner whose key this is."""
        return hmac.compare_digest(self.proof, _proof(key, self.lingers, self.node, self.upstream_id))


def session_name(key: bytes, lingers: bool, node: str, upstream_id: str) -> str:
    """The id of a session.

    Args:
        key: The key of its owner.
        lingers: Whether it was made on a socket.
        node: The key of its node.
        upstream_id: Its id there.

    Raises:
        ValueError: It would be too long, after too many gateways.
    """
    name = f"{_kind(lingers)}{node}{_proof(key, lingers, node, upstream_id)}.{upstream_id}"
    if len(name) > _LONGEST:
        raise ValueError(f"its id has {len(name)} characters after so many gateways, {_LONGEST} are allowed")
    return name


def parse_session_name(session_id: str) -> SessionName | None:
    """Parse an id; None for one that no gateway issued."""
    found = _PATTERN.fullmatch(session_id) if len(session_id) <= _LONGEST else None
    if found is None:
        return None
    kind, node, proof, upstream_id = found.groups()
    return SessionName(kind == "s", node, upstream_id, proof)


def _kind(lingers: bool) -> str:
    return "s" if lingers else "h"


def _proof(key: bytes, lingers: bool, node: str, upstream_id: str) -> str:
    content = f"{_kind(lingers)}{node}.{upstream_id}".encode()
    digest = hashlib.blake2b(content, digest_size=_PROOF_BYTES, key=key).digest()
    return base64.b32encode(digest).decode().lower()
