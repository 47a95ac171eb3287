"""Steps through a gateway to servers of third parties: python benchmarks/serving/http_upstreams.py [--out FILE].

The servers speak the protocol `http` with Python's standard library, in the ways in which one writes that: with and
without threads, keeping connections (HTTP/1.1) or closing them (HTTP/1.0), answering at once or after 200 ms. None has
room for more than five connections that it has not accepted yet, which is the library's default. All sessions step at
the same time; what is measured is how long such a round takes.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.soak.run import Server  # noqa: E402
from rollgym.clients.client.client import EnvClient  # noqa: E402
from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.clients.protocol.errors import ProblemError  # noqa: E402

UPSTREAM = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

threads, version, pause = sys.argv[1] == "threads", sys.argv[2], float(sys.argv[3])

class Handler(BaseHTTPRequestHandler):
    protocol_version = version
    disable_nagle_algorithm = True

    def do_GET(self):
        self.answer({"deterministic": False})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/step":
            time.sleep(pause)
        end = {"reward": 0.0, "terminated": False, "truncated": False}
        self.answer({"observation": "on", "info": {}, **(end if self.path == "/step" else {})})

    def answer(self, reply):
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

server = (ThreadingHTTPServer if threads else HTTPServer)(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
KINDS = {
    "one thread, HTTP/1.0": ("one", "HTTP/1.0", "0"),
    "one thread, HTTP/1.1": ("one", "HTTP/1.1", "0"),
    "threads, HTTP/1.0": ("threads", "HTTP/1.0", "0"),
    "threads, HTTP/1.1": ("threads", "HTTP/1.1", "0"),
    "threads, HTTP/1.0, 200 ms a step": ("threads", "HTTP/1.0", "0.2"),
    "threads, HTTP/1.1, 200 ms a step": ("threads", "HTTP/1.1", "0.2"),
}
LONGEST_S = 60.0


async def measure(gateway: Server, arguments: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-c", UPSTREAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    env_id = f"Env-{process.pid}"
    rounds: list[float] = []
    failed, first = 0, ""
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            body = {"env_id": env_id, "url": url, "protocol": "http", "ttl_s": 3600}
            answer = await http.post("/v1/envs", json=body)
            if answer.status_code != 201:
                return {"refused": answer.json()["detail"]}
        async with EnvClient(gateway.url, timeout_s=LONGEST_S) as client:
            sessions = await client.make_many(env_id, options.sessions)
            for first in range(0, len(sessions), 4):
                await asyncio.gather(*(each.reset(seed=1) for each in sessions[first : first + 4]))
            for _ in range(options.rounds):
                begun = time.monotonic()
                steps = await asyncio.gather(*(each.step("a") for each in sessions), return_exceptions=True)
                rounds.append(time.monotonic() - begun)
                errors = [step for step in steps if isinstance(step, Exception)]
                if errors:
                    failed, first = len(errors), str(errors[0])
                    break
    except (ProblemError, ConnectionError, TimeoutError) as error:
        # What a kind of server ends in is a result, too.
        return {
            "error": f"{type(error).__name__}: {error}"[:200],
            "seconds": [round(each, 3) for each in rounds],
        }
    finally:
        process.kill()
        process.wait()
    return {
        "median_s": round(statistics.median(rounds), 3),
        "longest_s": round(max(rounds), 3),
        "failed": failed,
        **({"error": first} if failed else {}),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    gateway = Server(["--gateway", "--allow-network", "loopback", "--step-timeout-s", "30"]).start()
    results = {}
    try:
        for kind, arguments in KINDS.items():
            results[kind] = await measure(gateway, arguments, options)
            print(kind, results[kind], flush=True)
    finally:
        gateway.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = asyncio.run(run(options))
    if options.out:
        commit = revision(short=True)
        about = {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}
        named = {"sessions": options.sessions, "rounds": options.rounds}
        options.out.write_text(json.dumps({"about": {**about, **named}, "servers": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
