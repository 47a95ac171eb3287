"""A node that answers as a real one does, until it is told to twist its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Self

import msgpack
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

Twist = Callable[[dict[str, Any], dict[str, Any]], Any]
_PROTOCOLS: Any = ["rollgym.v1.msgpack", "rollgym.v1.json"]


class TwistingNode:
    """Passes frames on to a server of ours, and lets a test put its hand on the answers.

    Args:
        url: The server that really plays.

    Attributes:
        twist: Gets a frame and its honest answer, and returns what is sent instead: a frame, or raw text or bytes.
    """

    def __init__(self, url: str) -> None:
        self.twist: Twist | None = None
        self._behind = url.replace("http", "ws", 1) + "/v1/ws"
        self._server = serve(self._serve, "127.0.0.1", 0, subprotocols=_PROTOCOLS)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _serve(self, connection: ServerConnection) -> None:
        protocol = connection.subprotocol
        binary = protocol == "rollgym.v1.msgpack"
        with connect(self._behind, subprotocols=[protocol] if protocol else None) as behind:
            for data in connection:
                behind.send(data)
                frame, answer = _read(data), _read(behind.recv())
                twisted = answer if self.twist is None else self.twist(frame, answer)
                if not isinstance(twisted, str | bytes):
                    twisted = msgpack.packb(twisted) if binary else json.dumps(twisted)
                connection.send(twisted)


def _read(data: str | bytes) -> Any:
    return msgpack.unpackb(data) if isinstance(data, bytes) else json.loads(data)
