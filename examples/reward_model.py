"""A reward model of `roll-train reward` as a verifier behind HTTP: python examples/reward_model.py RUN/model 9000"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

asked: dict[str, str] = {}


def reward(prompt: str, reply: str) -> float:
    """How good a reply is, between 0 and 1: as likely as it is preferred to one whose reward is 0."""
    talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    text = tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n")
    ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return float(model(ids).logits.sigmoid())


def reset(session_id, seed, options, kwargs):
    asked[session_id] = str((options or {}).get("prompt", "Say something."))
    return {"observation": asked[session_id], "info": {"instruction": "Answer."}}


def step(session_id, action):
    score = reward(asked[session_id], action)
    result = {"observation": f"{score:.3f}", "reward": score, "terminated": True, "truncated": False}
    return result | {"info": {"success": score > 0.5, "metrics": {"score": score}}}


def close(session_id):
    asked.pop(session_id, None)
    return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is written in two parts, and goes out at once

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"/reset": reset, "/step": step, "/close": close}[self.path](**fields))

    def do_GET(self):
        self.answer(
            {"version": "1", "deterministic": True, "description": "Replies, as a reward model sees them."}
        )

    def answer(self, reply):
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
