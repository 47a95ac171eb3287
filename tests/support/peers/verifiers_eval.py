"""Evaluates a model on FrozenLake by verifiers' own command, `vf-eval`: the command, and the server's URL.

The model is a double behind OpenAI's API, which finds its way on the map that it is shown.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.chat_model import walks_to_the_goal

# As docs/coming_from/verifiers.md has it, with another model.
CONFIG = """
model = "double"
push = false

[client]
base_url = "{model_url}/v1"
api_key_var = "DOUBLE_KEY"

[env.taskset]
id = "openenv"
base_url = "{url}/openenv/FrozenLake-v0"
resets = [{{ seed = 3 }}, {{ seed = 4 }}]

[env.player.harness]
id = "null"

[env.player.runtime]
type = "subprocess"
"""


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = json.loads(request["messages"][-1]["content"])["observation"]["text"]
        content = b"".join(streamed(shown))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are no news."""


def streamed(shown: str) -> list[bytes]:
    """The reply to an observation, as the events of a stream."""
    answer = json.loads(walks_to_the_goal({"messages": [{"content": shown}]})[2])
    said, usage = answer["choices"][0]["message"]["content"], answer["usage"] | {"total_tokens": 12}
    about = {"id": "reply", "object": "chat.completion.chunk", "created": 0, "model": "double"}
    delta = {"role": "assistant", "content": said}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    events = [json.dumps(about | chunk) for chunk in chunks]
    return [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]


def evaluate(command: str, url: str, model_url: str, place: Path) -> list[dict[str, Any]]:
    """Run the command; gives what it has written of each rollout."""
    config = place / "eval.toml"
    config.write_text(CONFIG.format(url=url, model_url=model_url))
    arguments = (command, "@", str(config), "--no-rich", "--output-dir", str(place / "outputs"))
    done = subprocess.run(
        arguments,
        cwd=place,
        env=os.environ | {"DOUBLE_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (traces,) = place.glob("outputs/*/traces.jsonl")
    return [json.loads(line) for line in traces.read_text().splitlines()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, ThreadingHTTPServer(("127.0.0.1", 0), Model) as model:
        threading.Thread(target=model.serve_forever, daemon=True).start()
        rollouts = evaluate(sys.argv[1], sys.argv[2], f"http://127.0.0.1:{model.server_port}", Path(place))
        model.shutdown()
    rewards = [trace["rewards"]["openenv_reward"]["score"] for each in rollouts for trace in each["traces"]]
    assert all(each["ok"] for each in rollouts), [each["errors"] for each in rollouts]
    assert rewards == [1.0, 1.0], rewards
    print("verifiers: vf-eval solves FrozenLake with seeds 3 and 4")
