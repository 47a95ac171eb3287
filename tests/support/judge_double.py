"""A double of a judge behind an OpenAI-compatible endpoint: a third party's model, which no test can have."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_FENCED = re.compile(r"<([a-z]+)-([0-9a-f]{16})>\n(.*?)\n</\1-\2>", re.DOTALL)


def completion(text: str, tokens: int = 10) -> tuple[int, dict[str, str], bytes]:
    """A reply of the endpoint that says a text."""
    message = {"role": "assistant", "content": text}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"total_tokens": tokens},
    }
    return 200, {}, json.dumps(body).encode()


def fenced(request: dict[str, Any]) -> list[tuple[str, str]]:
    """The texts that a request puts between markers, by their names."""
    return [(name, text) for name, _, text in _FENCED.findall(request["messages"][1]["content"])]


def honest(request: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Judges by equality of texts, for templates that ask for a token."""
    texts = [
        text.strip().casefold().strip(".")
        for name, text in fenced(request)
        if name in ("reference", "answer")
    ]
    same = texts[0] == texts[1]
    if "[[A=B]]" in request["messages"][0]["content"]:
        return completion(f"I compare them.\n{'[[A=B]]' if same else '[[A!=B]]'}")
    return completion(f"I compare them.\n{'[[YES]]' if same else '[[NO]]'}")


class JudgeDouble:
    """The endpoint, for the length of a `with`.

    Args:
        answer: What it answers to the body of a request.

    Attributes:
        requests: The bodies so far, with the authorization that came with each.
    """

    def __init__(
        self, answer: Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]] = honest
    ) -> None:
        self.answer = answer
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                double.requests.append((body, self.headers.get("Authorization")))
                status, headers, content = double.answer(body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            # Clients that come at once are not sent away for a second.
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> JudgeDouble:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
