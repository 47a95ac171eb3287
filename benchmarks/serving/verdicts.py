"""What clients that want responses scored say, as in `wire.py`: a request stands for as many items as it holds."""

import itertools
import random
from typing import Any

import orjson
from wire import Dialect, Session, expect, post

ENV_ID = "Arithmetic-v0"
_RIGHT = 0.5


def items(count: int, seed: int) -> list[dict[str, Any]]:
    """Responses to sums, half of them right; the first one is."""
    generator = random.Random(seed)
    made = []
    for number in range(count):
        left, right = generator.randrange(100), generator.randrange(100)
        said = left + right + (number > 0 and generator.random() > _RIGHT)
        made.append(
            {
                "question": f"{left} + {right}",
                "answer": str(left + right),
                "response": f"<think>{left} and {right}, carry the tens.</think><answer>{said}</answer>",
            }
        )
    return made


def over_http(count: int) -> Dialect:
    """Our HTTP call with so many items."""

    def session(index: int) -> Session:
        request = post(f"/v1/verify/{ENV_ID}", {"items": items(count, index)})
        while True:
            _check(count, (yield count, request))

    return session


def over_socket(count: int) -> Dialect:
    """The socket's frame with so many items."""

    def session(index: int) -> Session:
        frame = {"id": index, "op": "verify", "env_id": ENV_ID, "items": items(count, index)}
        content = orjson.dumps(frame)
        while True:
            _check(count, (yield count, content))

    return session


def _check(count: int, answer: bytes) -> None:
    expect(b'"outcome":"correct"', answer)
    if answer.count(b'"outcome":') != count or b'"error"' in answer or b'"timeout"' in answer:
        raise RuntimeError(f"not {count} verdicts: {answer!r}")


def nemo_gym(index: int) -> Session:
    """NeMo Gym's `POST /verify`, whose items are single; the responses are the same."""
    requests = []
    for item in items(64, index):
        text = {"type": "output_text", "text": item["response"], "annotations": []}
        message = {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [text],
        }
        response = {
            "id": "r",
            "object": "response",
            "created_at": 0.0,
            "model": "m",
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
        question = {"input": [{"role": "user", "content": f"{item['question']} = ?"}]}
        fields = {"responses_create_params": question, "response": response}
        requests.append(post("/verify", {**fields, "question": item["question"], "answer": item["answer"]}))
    cookie = b""
    for request in itertools.cycle(requests):
        answer = yield 1, request.replace(b"X-None: 0", cookie) if cookie else request
        expect(b'"outcome":"', answer)
        start = answer.find(b"set-cookie: ")
        if start >= 0:
            cookie = b"Cookie: " + answer[start + len(b"set-cookie: ") : answer.index(b";", start)]
