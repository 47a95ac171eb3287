"""A judge as a program that a run starts: `python -m tests.support.judge_program HOST PORT [GATE]`.

It judges by equality of texts, behind OpenAI's API, and says at `/health` that it is there. With a gate, a path, it
answers no question before a file lies there; it leaves `GATE.asked`, a character for each question.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.judge_double import honest

GATE = Path(sys.argv[3]) if len(sys.argv) > 3 else None


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if GATE is not None:
            with GATE.with_name(f"{GATE.name}.asked").open("a") as asked:
                asked.write("?")
            while not GATE.exists():
                time.sleep(0.01)
        status, headers, body = honest(request)
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    Server((sys.argv[1], int(sys.argv[2])), Judge).serve_forever()
