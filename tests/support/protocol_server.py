"""A server of a third party that speaks our protocol over WebSocket on loopback, and knows of one environment."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from typing import Any, Self

import msgpack
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

TEXT = {"type": "UnicodeText"}
"""A space of texts."""


def server_info(name: str) -> dict[str, Any]:
    """What a server says of itself."""
    return {
        "name": name,
        "version": "1",
        "protocol": 1,
        "role": "server",
        "processes": 1,
        "limits": {},
        "capacity": {"sessions": 0, "max_sessions": 99},
    }


def described_env(env_id: str, **other: Any) -> dict[str, Any]:
    """What a server says of an environment whose observations and actions are texts."""
    return {
        "env_id": env_id,
        "version": "1",
        "kind": "episodic",
        "origin": "local",
        "isolation": "inline",
        "description": "",
        "action_space": TEXT,
        "observation_space": TEXT,
        "kwargs_schema": {},
        "max_episode_steps": None,
        "deterministic": True,
        "forkable": False,
        "replicas": 1,
        "metadata": {},
        **other,
    }


def made_session(session_id: str, env_id: str) -> dict[str, Any]:
    """What a server says of a session that was made."""
    return {"session_id": session_id, "env_id": env_id, "action_space": TEXT, "observation_space": TEXT}


class ProtocolServer(ABC):
    """Hands each operation, those of a batch one by one, to whoever inherits from it, and sends what that returns.

    Attributes:
        encodings: What it can be spoken to in.
        url: Where it is.
    """

    encodings: tuple[str, ...] = ("json", "msgpack")

    def __init__(self) -> None:
        spoken = [Subprotocol(f"rollgym.v1.{encoding}") for encoding in self.encodings]
        self._server = serve(self._answer, "127.0.0.1", 0, subprotocols=spoken)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    @abstractmethod
    def one(self, frame: dict[str, Any]) -> Any:
        """Return the answer to one operation; bytes are sent as they are."""

    def _answer(self, connection: ServerConnection) -> None:
        for data in connection:
            frame = msgpack.unpackb(data) if isinstance(data, bytes) else json.loads(data)
            if frame["op"] == "batch":
                said: Any = {"results": [{"ok": self.one(each)} for each in frame["ops"]]}
            else:
                said = {"ok": self.one(frame)}
            if isinstance(said.get("ok"), bytes):
                connection.send(said["ok"])
                continue
            reply = {"id": frame["id"]} | said
            connection.send(msgpack.packb(reply) if isinstance(data, bytes) else json.dumps(reply))
