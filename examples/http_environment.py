"""An environment behind HTTP without any package: python examples/http_environment.py 9000"""

import json
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

secrets: dict[str, int] = {}


def reset(session_id, seed, options, kwargs):
    secrets[session_id] = random.Random(seed).randrange(10)
    return {"observation": "Guess a number from 0 to 9.", "info": {"instruction": "Answer with one number."}}


def step(session_id, action):
    right = action.strip() == str(secrets[session_id])
    hint = "Right." if right else f"No, not {action}."
    result = {"observation": hint, "reward": float(right), "terminated": right, "truncated": False}
    return result | {"info": {"success": right}}


def close(session_id):
    secrets.pop(session_id, None)
    return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is written in two parts, and goes out at once

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"/reset": reset, "/step": step, "/close": close}[self.path](**fields))

    def do_GET(self):
        self.answer({"version": "1", "deterministic": True, "description": "Guess a number."})

    def answer(self, reply):
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
