"""A whole environment on the standard library (reply with a vowel): python examples/twenty_lines.py 9000"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Vowels(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {}
        if self.path == "/reset":
            reply = {"observation": "Your turn.", "info": {"instruction": "Reply with a vowel."}}
        elif self.path == "/step":
            right = body["action"][:1] in set("aeiou")
            reply = {"observation": "Over.", "reward": float(right), "terminated": True, "truncated": False}
            reply["info"] = {"success": right}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


ThreadingHTTPServer.request_queue_size = 256  # as many sessions may call at the same time
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Vowels).serve_forever()
