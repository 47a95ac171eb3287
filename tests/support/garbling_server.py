"""A server of our protocol that answers as it should, but for what it is told to answer otherwise."""

from __future__ import annotations

import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.support.protocol_server import ProtocolServer, described_env, made_session, server_info

_BEGUN = {"observation": "go", "info": {}, "episode": 0, "step": 0, "seed": 1}
GOOD: dict[str, Any] = {
    "info": server_info("garbling"),
    "envs": described_env(
        "Good-v0",
        kwargs_schema={"properties": {"size": {"type": "integer", "default": 4}}},
        forkable=True,
        metadata={"render_modes": ["ansi"]},
    ),
    "make": made_session("s", "Good-v0"),
    "reset": _BEGUN,
    "step": {
        "observation": "on",
        "reward": 0.0,
        "terminated": True,
        "truncated": False,
        "info": {},
        "episode": 0,
        "step": 1,
        "reset": _BEGUN | {"episode": 1},
    },
    "render": {"frame": "a picture"},
    "episode": {
        "format": 1,
        "env_id": "Good-v0",
        "env_version": "1",
        "kwargs": {},
        "episode": 0,
        "seed": 1,
        "options": None,
        "reset_digest": "0" * 16,
        "actions": [],
        "digests": [],
        "reseeds": [],
    },
    "session": {"env_id": "Good-v0", "episode": 0, "step": 0, "seed": 1},
    "fork": {"session_ids": ["f"]},
    "restore": made_session("r", "Good-v0"),
    "close": {"closed": 1},
    "verify": {"results": [{"score": 1.0, "outcome": "correct", "detail": ""}]},
}
"""What it answers to each operation where it is told nothing."""
GARBAGE: list[Any] = [None, 5, "no", [], [1], {}]
"""Answers that no operation has."""


class GarblingServer(ProtocolServer):
    """Answers on loopback.

    Attributes:
        answers: What is answered to each operation; bytes are sent as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}

    def one(self, frame: dict[str, Any]) -> Any:
        """Return what was told, or else the good answer."""
        op = frame["op"]
        if op in self.answers:
            return self.answers[op]
        good = deepcopy(GOOD[op])
        if op == "envs" and "env_id" not in frame:
            return {"envs": [good]}
        if op == "make" and "count" in frame:
            return {"sessions": [good] * frame["count"]}
        return good


class HttpSaying:
    """An HTTP server on loopback, such as a proxy or half a gateway.

    Attributes:
        said: Status and body of the answer to each method and path; the first that a path begins with.
    """

    def __init__(self, said: dict[tuple[str, str], tuple[int, bytes]]) -> None:
        self.said = said
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = next(
                    answer
                    for (method, path), answer in outer.said.items()
                    if method == self.command and self.path.startswith(path)
                )
                self.send_response(status)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        for method in ("GET", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.answer)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
