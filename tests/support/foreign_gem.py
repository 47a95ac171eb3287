"""A server in this process that speaks GEM over HTTP, well or as a test says."""

from typing import Any

from tests.support.foreign_servers import plain

STEP = {"observation": "on", "reward": 0, "terminated": False, "truncated": False, "info": {}}


class Gem:
    """Answers as GEM does; what is put in `paths` is answered to a call instead."""

    def __init__(self, **paths: Any) -> None:
        self.paths = paths
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        call = path.removeprefix("/apis/v1/envs/gem/")
        self.calls.append((call, body))
        made = sum(name == "make" for name, _ in self.calls)
        good = {
            "make": {"sandbox_id": f"box-{made}"},
            "reset": {"observation": "begin", "info": {}},
            "step": STEP,
            "close": {"sandbox_id": body.get("sandbox_id")},
        }
        reply = {**good, **self.paths}[call]
        return reply if isinstance(reply, tuple) else plain(reply)

    def named(self, call: str) -> list[dict[str, Any]]:
        return [body for name, body in self.calls if name == call]
