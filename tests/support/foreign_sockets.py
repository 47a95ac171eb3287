"""A server of a third party that speaks our protocol, and is careless about it."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

from websockets.sync.server import ServerConnection, serve

_TEXT = {"type": "UnicodeText"}
_ENV: dict[str, Any] = {
    "env_id": "Careless-v0",
    "version": "1",
    "kind": "episodic",
    "origin": "local",
    "isolation": "inline",
    "description": "",
    "action_space": _TEXT,
    "observation_space": _TEXT,
    "kwargs_schema": {},
    "max_episode_steps": 2,
    "deterministic": True,
    "forkable": False,
    "replicas": 1,
    "metadata": {},
}
_INFO = {
    "name": "careless",
    "version": "1",
    "protocol": 1,
    "role": "server",
    "processes": 1,
    "limits": {},
    "capacity": {"sessions": 0, "max_sessions": 99},
}


class Careless:
    """Takes steps after the end and pays 7 for them, and pays what is no number for a yes."""

    def __init__(self) -> None:
        self._server = serve(self._answer, "127.0.0.1", 0, subprotocols=["rollgym.v1.json"])  # type: ignore[list-item]
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._steps: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _answer(self, connection: ServerConnection) -> None:
        for text in connection:
            frame = json.loads(text)
            if frame["op"] == "batch":
                reply: dict[str, Any] = {"results": [{"ok": self._one(each)} for each in frame["ops"]]}
            else:
                reply = {"ok": self._one(frame)}
            connection.send(json.dumps({"id": frame["id"]} | reply))

    def _one(self, frame: dict[str, Any]) -> dict[str, Any]:
        op = frame["op"]
        if op in ("info", "envs"):
            return _INFO if op == "info" else _ENV
        if op == "make":
            made = [self._made() for _ in range(frame.get("count", 1))]
            return {"sessions": made} if "count" in frame else made[0]
        if op == "close":
            return {"closed": len(frame["session_ids"])}
        session_id = frame["session_id"]
        episode, steps = self._steps[session_id]
        if op == "reset":
            self._steps[session_id] = episode + 1, 0
            info = {"instruction": "Say something.", "success": False}
            return {
                "observation": "go",
                "info": info,
                "episode": episode + 1,
                "step": 0,
                "seed": frame["seed"],
            }
        self._steps[session_id] = episode, steps + 1
        reward: Any = 7.0 if steps >= 2 else "NaN" if frame["action"] == "yes" else 0.0
        return {
            "observation": "on",
            "reward": reward,
            "terminated": steps >= 1,
            "truncated": False,
            "info": {"success": False, "action_is_valid": "no such" not in frame["action"]},
            "episode": episode,
            "step": steps + 1,
        }

    def _made(self) -> dict[str, Any]:
        session_id = f"s{len(self._steps)}"
        self._steps[session_id] = -1, 0
        return {
            "session_id": session_id,
            "env_id": _ENV["env_id"],
            "action_space": _TEXT,
            "observation_space": _TEXT,
        }
