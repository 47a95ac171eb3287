"""A server of a third party that speaks our protocol, and is careless about it."""

from __future__ import annotations

from typing import Any

from tests.support.protocol_server import ProtocolServer, described_env, made_session, server_info

_ENV = described_env("Careless-v0", max_episode_steps=2)


class Careless(ProtocolServer):
    """Takes steps after the end and pays 7 for them, and pays what is no number for a yes."""

    encodings = ("json",)

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[str, tuple[int, int]] = {}

    def one(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return what it says to one operation."""
        op = frame["op"]
        if op in ("info", "envs"):
            return server_info("careless") if op == "info" else _ENV
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
        return made_session(session_id, _ENV["env_id"])
