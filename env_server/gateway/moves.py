"""Where sessions at nodes are: their ids name the owner and the node, so that any gateway can continue a session.

An id is `<kind><node><proof>.<id at the node>`. If a node is itself a gateway, the id there has the same form. A table
has the moved sessions, whose ids name another node; it survives a restart of the gateway.
"""

import base64
import errno
import hashlib
import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import TypeAdapter, ValidationError

from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.upstream.node import NODE_KEY_CHARACTERS

_PROOF_BYTES = 10
_PROOF = 16
_LONGEST = 128
_PATTERN = re.compile(rf"([sh])([a-z2-7]{{{NODE_KEY_CHARACTERS}}})([a-z2-7]{{{_PROOF}}})\.([A-Za-z0-9._-]+)")
_MOVE = TypeAdapter(tuple[str, tuple[str, str] | None])
# Rewriting all moves takes the event loop's time, and a disk that was full a moment ago is likely still full.
_RETRY_S = 10.0
_log = logging.getLogger(__name__)


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


class Moves:
    """The moves of the sessions of one gateway.

    A move is a line that is passed to the kernel before the new node's first answer goes out, so that it outlives the
    process. If a line cannot be written, as on a full disk, the file is renamed, which takes no space: it lacks moves,
    and the next gateway knows that it is incomplete. Once there is space, all moves are rewritten under the original
    name.

    Args:
        path: The file; None to keep nothing. A file that lacks moves is beside it (`.incomplete`).

    Attributes:
        are_known: Whether all moves of the gateways before this one are known.

    Raises:
        ConfigurationError: The file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self.are_known = False
        self._places: dict[str, tuple[str, str]] = {}
        self._file: BinaryIO | None = None
        self._path = path
        self._lacks_earlier = False
        self._retry_at = 0.0
        if path is None:
            return
        try:
            self._take_over(path)
            self._write_anew(path)
        except OSError as error:
            raise ConfigurationError(f"cannot use {path}: {error}") from error

    def place(self, session_id: str) -> tuple[str, str] | None:
        """The key of the node that a session moved to, and its id there; None if it has not moved."""
        return self._places.get(session_id)

    def moved(self, session_id: str, node: str, upstream_id: str) -> None:
        """Record the new node of a session."""
        self._places[session_id] = node, upstream_id
        self._write(_line(session_id, (node, upstream_id)))

    def ended(self, session_id: str) -> None:
        """Forget the move of an ended session."""
        if self._places.pop(session_id, None) is not None:
            self._write(_line(session_id, None))

    def close(self) -> None:
        """Close the file, after a last attempt to write the missing moves."""
        if self._path is not None and self._file is None:
            self._try_anew(self._path)
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path = None

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        if self._path is None:
            return
        if self._file is None:
            if time.monotonic() >= self._retry_at:
                self._try_anew(self._path)
            return
        try:
            _write_whole(self._file, line)
        except OSError as error:
            _log.error("moves of sessions cannot be written down: %s", error)
            self._file.close()
            self._file = None
            self._retry_at = time.monotonic() + _RETRY_S
            _say_incomplete(self._path)

    def _try_anew(self, path: Path) -> None:
        try:
            self._write_anew(path)
        except OSError:
            self._retry_at = time.monotonic() + _RETRY_S
        else:
            _log.warning("moves of sessions are written down again")

    def _write_anew(self, path: Path) -> None:
        """Write all moves that are known to a new file, in the place of the old one."""
        fresh, incomplete = path.with_suffix(".new"), path.with_suffix(".incomplete")
        fresh.touch(mode=0o600)
        home, other = (incomplete, path) if self._lacks_earlier else (path, incomplete)
        # Open before it has its name: a file of that name to which nothing more is added would pass for whole.
        file = fresh.open("wb", buffering=0)
        try:
            _write_whole(file, b"".join(_line(each, place) for each, place in self._places.items()))
            fresh.replace(home)
        except OSError:
            file.close()
            raise
        self._file = file
        other.unlink(missing_ok=True)

    # -- reading -------------------------------------------------------------------------------------------------

    def _take_over(self, path: Path) -> None:
        """Read the moves that the previous gateway wrote."""
        incomplete = path.with_suffix(".incomplete")
        if path.exists():
            self._lacks_earlier = not self._read(path.read_bytes())
            self.are_known = not self._lacks_earlier
        elif incomplete.exists():
            self._read(incomplete.read_bytes())
            self._lacks_earlier = True
        if self._lacks_earlier:
            _log.warning(
                "%s lacks moves of sessions: a step of a session from before this start has to name its episode and "
                "step; remove the file once no such session is left",
                incomplete,
            )

    def _read(self, content: bytes) -> bool:
        """Take in the moves of a file; whether it is whole."""
        *lines, rest = content.split(b"\n")
        is_whole = not rest
        for line in lines:
            try:
                session_id, place = _MOVE.validate_json(line)
            except ValidationError:
                _log.error("a move of a session cannot be read: %s", line[:100])
                is_whole = False
                continue
            if place is None:
                self._places.pop(session_id, None)
            else:
                self._places[session_id] = place
        return is_whole


def _write_whole(file: BinaryIO, content: bytes) -> None:
    """Write all of it at once to a file without a buffer; a disk that is nearly full takes a part."""
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _say_incomplete(path: Path) -> None:
    """Rename a file that lacks moves, so that no gateway takes it for complete."""
    try:
        if path.exists():
            path.replace(path.with_suffix(".incomplete"))
    except OSError as error:
        _log.error("remove %s before the next start: it lacks moves of sessions: %s", path, error)


def _line(session_id: str, place: tuple[str, str] | None) -> bytes:
    return orjson.dumps([session_id, place]) + b"\n"
