"""What each server's clients say: a generator for each session yields requests and is sent the answers.

A request is `(steps, content)`: how many steps its answer stands for, and the message, or all of an HTTP request.
The conversation is that of the documented API: an episode that ended is begun anew by whatever call does that.
"""

import itertools
import json
import random
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import Any

import orjson

ENV_ID = "FrozenLake-v0"
ACTION = "<answer>Left</answer>"
"""The start is in the left column, so this goes on until the 100th step truncates the episode."""
_MOVES = (b"Left", b"Down", b"Right", b"Up")

Session = Generator[tuple[int, bytes], bytes, None]
Dialect = Callable[[int], Session]
"""Makes the session of an index; the index is the seed of its map as well."""

Rows = Sequence[Sequence[int]]


def openenv(index: int) -> Session:
    reset = orjson.dumps({"type": "reset", "data": {"seed": index}})
    step = orjson.dumps({"type": "step", "data": {"action": ACTION}})
    answer = yield 0, reset
    while True:
        answer = yield 1, step
        expect(b'"reward":', answer)
        if b'"done":true' in answer:
            yield 0, reset


def aviary(index: int) -> Session:
    answer = yield 0, post("/start", {"task_idx": index})
    env_id = _body(answer)["env_id"]
    reset = post("/reset", {"env_id": env_id})
    step = post("/step", {"env_id": env_id, "action": {"role": "assistant", "content": ACTION}})
    yield 0, reset
    while True:
        answer = yield 1, step
        expect(b'"content":', answer)
        if answer.endswith(b"true]"):
            yield 0, reset


def nemo_gym(index: int) -> Session:
    question: dict[str, Any] = {"input": [{"role": "user", "content": "Walk."}]}
    begin = {"responses_create_params": question, "seed": index}
    answer = yield 0, post("/reset", begin)
    start = answer.index(b"set-cookie: ") + len(b"set-cookie: ")
    cookie = b"Cookie: " + answer[start : answer.index(b";", start)]
    text = {"type": "output_text", "text": ACTION, "annotations": []}
    message = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [text]}
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
    reset = post("/reset", begin, cookie)
    step = post("/step", {"responses_create_params": question, "response": response}, cookie)
    while True:
        answer = yield 1, step
        expect(b'"reward":', answer)
        if b'"truncated":true' in answer or b'"terminated":true' in answer:
            yield 0, reset


def openreward(index: int) -> Session:
    while True:
        header = f"X-Session-ID: {uuid.uuid4()}".encode()
        yield 0, post("/create", {"task_spec": {"seed": index}}, header)
        step = post("/lakeenvironment/call", {"name": "move", "input": {"action": ACTION}}, header)
        finished = False
        while not finished:
            answer = yield 1, step
            expect(b'"ok":true', answer)
            finished = b'"finished":true' in answer
        yield 0, post("/delete", {}, header)


def rollgym(index: int) -> Session:
    fields = {"id": index, "op": "make", "env_id": ENV_ID, "reset": {"seed": index}}
    made = orjson.loads((yield 0, orjson.dumps(fields)))["ok"]
    step = {"id": index, "op": "step", "session_id": made["session_id"], "action": ACTION, "autoreset": True}
    head = orjson.dumps(step)[:-1]
    yield from _rollgym_steps(lambda episode, at: b'%b,"episode":%d,"step":%d}' % (head, episode, at))


def rollgym_walk(index: int) -> Session:
    """FrozenLake-v0 with moves at random: episodes end soon, by a step that begins the next one."""
    generator = random.Random(index)
    fields = {"id": index, "op": "make", "env_id": ENV_ID, "reset": {"seed": index}}
    made = orjson.loads((yield 0, orjson.dumps(fields)))["ok"]
    step = {"id": index, "op": "step", "session_id": made["session_id"], "autoreset": True}
    head = orjson.dumps(step)[:-1]
    episode = at = 0
    while True:
        content = b'%b,"action":"%b","episode":%d,"step":%d}' % (head, generator.choice(_MOVES), episode, at)
        answer = yield 1, content
        expect(b'"reward":', answer)
        at += 1
        if b'"terminated":true' in answer or b'"truncated":true' in answer:
            episode, at = episode + 1, 0


def rollgym_long(length: int, steps: int) -> Dialect:
    """Observations of some length; a session counts as stepped when it has taken all of its steps."""

    def session(index: int) -> Session:
        fields = {
            "id": index,
            "op": "make",
            "env_id": "LongReplies",
            "kwargs": {"length": length},
            "reset": {},
        }
        made = orjson.loads((yield 0, orjson.dumps(fields)))["ok"]
        step = {"id": index, "op": "step", "session_id": made["session_id"], "action": ACTION}
        for number in itertools.count(1):
            expect(b'"reward":', (yield int(number >= steps), orjson.dumps(step)))

    return session


def rollgym_http(index: int) -> Session:
    answer = yield 0, post("/v1/sessions", {"env_id": ENV_ID, "reset": {"seed": index}})
    path = f"/v1/sessions/{_body(answer)['session_id']}/step"

    def request(episode: int, at: int) -> bytes:
        return post(path, {"action": ACTION, "autoreset": True, "episode": episode, "step": at})

    yield from _rollgym_steps(request)


def rollgym_batch(count: int) -> Dialect:
    """One frame for `count` sessions."""

    def session(index: int) -> Session:
        fields = {"id": index, "op": "make", "env_id": ENV_ID, "count": count, "reset": {"seed": index}}
        made = orjson.loads((yield 0, orjson.dumps(fields)))["ok"]["sessions"]
        step = {"op": "step", "action": ACTION, "autoreset": True}
        heads = [orjson.dumps({**step, "session_id": each["session_id"]})[:-1] for each in made]

        def request(episode: int, at: int) -> bytes:
            tail = b',"episode":%d,"step":%d}' % (episode, at)
            return b'{"id":0,"op":"batch","ops":[%b]}' % b",".join(head + tail for head in heads)

        yield from _rollgym_steps(request, count)

    return session


def _rollgym_steps(request: Callable[[int, int], bytes], count: int = 1) -> Session:
    """Steps that name their episode and index, as our client's do; episodes end by truncation only."""
    episode = at = 0
    while True:
        answer = yield count, request(episode, at)
        expect(b'"reward":', answer)
        at += 1
        if b'"truncated":true' in answer:
            episode, at = episode + 1, 0


def gymnasium_batch(env_id: str, count: int, rows: Rows) -> Dialect:
    """One frame for `count` sessions of a Gymnasium environment with a Discrete action space, whose episodes end.

    Args:
        env_id: What the server calls it.
        count: How many sessions.
        rows: Actions for all of them, which are taken in turns.
    """

    def session(index: int) -> Session:
        fields = {"id": index, "op": "make", "env_id": env_id, "count": count, "reset": {}}
        made = orjson.loads((yield 0, orjson.dumps(fields)))["ok"]["sessions"]
        step = {"op": "step", "autoreset": True}
        heads = [orjson.dumps({**step, "session_id": each["session_id"]})[:-1] for each in made]
        places = [(0, 0)] * count
        for row in itertools.cycle(rows):
            ops = [
                b'%b,"action":%d,"episode":%d,"step":%d}' % (head, action, episode, at)
                for head, action, (episode, at) in zip(heads, row, places, strict=True)
            ]
            answer = yield count, b'{"id":%d,"op":"batch","ops":[%b]}' % (index, b",".join(ops))
            outcomes = [result["ok"] for result in orjson.loads(answer)["results"]]
            places = [
                (episode + 1, 0) if outcome["terminated"] or outcome["truncated"] else (episode, at + 1)
                for outcome, (episode, at) in zip(outcomes, places, strict=True)
            ]

    return session


def bare_gymnasium_batch(count: int, rows: Rows) -> Dialect:
    """One frame for `count` environments of `bare.py`."""

    def session(index: int) -> Session:
        for row in itertools.cycle(rows):
            ops = [{"op": "step", "action": action} for action in row]
            answer = yield count, orjson.dumps({"id": index, "op": "batch", "ops": ops})
            expect(b'"reward":', answer)

    return session


def bare(index: int) -> Session:
    step = orjson.dumps({"id": index, "op": "step", "action": ACTION})
    while True:
        expect(b'"reward":', (yield 1, step))


def bare_walk(index: int) -> Session:
    """Moves at random, as `rollgym_walk` makes them."""
    generator = random.Random(index)
    while True:
        expect(
            b'"reward":',
            (yield 1, b'{"id":%d,"op":"step","action":"%b"}' % (index, generator.choice(_MOVES))),
        )


def bare_batch(count: int) -> Dialect:
    """One frame for `count` environments."""

    def session(index: int) -> Session:
        ops = [{"op": "step", "action": ACTION}] * count
        frame = orjson.dumps({"id": index, "op": "batch", "ops": ops})
        while True:
            expect(b'"reward":', (yield count, frame))

    return session


def post(path: str, content: dict[str, Any], header: bytes = b"X-None: 0") -> bytes:
    """A request with a JSON body."""
    body = orjson.dumps(content)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    return b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (head, header, len(body), body)


def _body(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def expect(part: bytes, answer: bytes) -> None:
    """Make sure that an answer is what it should be.

    Raises:
        RuntimeError: It is not.
    """
    if part not in answer:
        raise RuntimeError(f"not the answer to a step: {answer!r}")
