"""Where sessions went on that their ids say to be elsewhere, on disk: a gateway that is started anew knows it again."""

import logging
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import TypeAdapter, ValidationError

from env_server.common.settings import ConfigurationError

_MOVE = TypeAdapter(tuple[str, tuple[str, str] | None])
_log = logging.getLogger(__name__)


class Moves:
    """The moves of the sessions of one gateway.

    A move is a line that is handed to the kernel before a step is answered at the new place, so that it outlives the
    process. A line that was being written when the process died is not whole, and its move had not counted yet.

    Args:
        path: The file; None where nothing is kept.

    Raises:
        ConfigurationError: The file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._places: dict[str, tuple[str, str]] = {}
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            if path.exists():
                self._read(path.read_bytes())
            fresh = path.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_bytes(b"".join(_line(each, place) for each, place in self._places.items()))
            fresh.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigurationError(f"cannot use {path}: {error}") from error

    @property
    def are_kept(self) -> bool:
        """Whether moves outlive this process."""
        return self._file is not None

    def place(self, session_id: str) -> tuple[str, str] | None:
        """The key of the node that a session moved to, and its id there; None if it is where its id says."""
        return self._places.get(session_id)

    def moved(self, session_id: str, node: str, upstream_id: str) -> None:
        """Note where a session lives from now on."""
        self._places[session_id] = node, upstream_id
        self._write(_line(session_id, (node, upstream_id)))

    def ended(self, session_id: str) -> None:
        """Forget a session."""
        if self._places.pop(session_id, None) is not None:
            self._write(_line(session_id, None))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            # What is in the file grows old from here on; sessions that are found again have to prove where they are.
            _log.error("moves of sessions are not kept any more: %s", error)
            self._file.close()
            self._file = None

    def _read(self, content: bytes) -> None:
        for line in content.split(b"\n")[:-1]:
            try:
                session_id, place = _MOVE.validate_json(line)
            except ValidationError:
                _log.error("a move of a session cannot be read: %s", line[:100])
                continue
            if place is None:
                self._places.pop(session_id, None)
            else:
                self._places[session_id] = place


def _line(session_id: str, place: tuple[str, str] | None) -> bytes:
    return orjson.dumps([session_id, place]) + b"\n"
