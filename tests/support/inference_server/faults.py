"""What goes wrong on purpose: an ASGI layer that answers instead of the server, late, or only in part."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Fault:
    """One way to fail, for a number of requests.

    Attributes:
        kind: "answer" gives `status` and `body` instead; "cut" drops the connection before any answer; "cut_body"
            drops it after half of the answer; "late" answers after `seconds`; "drip" begins an answer and goes on with
            it for ever, a space every `seconds`; "edit" applies `edit` to a reply.
        path: Requests whose path starts so.
        count: How many requests; -1 for all.
        skip: Requests that pass first.
        edit: Of a reply in JSON: see `edited`.
    """

    kind: str
    path: str = "/"
    count: int = 1
    skip: int = 0
    status: int = 503
    body: str = '{"error":{"message":"overloaded","type":"ServiceUnavailable","param":null,"code":503}}'
    seconds: float = 0.0
    edit: str = ""


class Faults:
    """The layer before the server.

    Args:
        app: The server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.planned: list[Fault] = []
        self.happened: list[str] = []

    def _next(self, path: str) -> Fault | None:
        for fault in self.planned:
            if path.startswith(fault.path) and fault.count:
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.count -= 1
                self.happened.append(fault.kind)
                return fault
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        fault = None if scope["type"] != "http" or path.startswith("/_test") else self._next(path)
        if fault is None:
            await self._app(scope, receive, send)
        elif fault.kind == "answer":
            await asyncio.sleep(fault.seconds)
            await _answer(send, fault.status, fault.body.encode())
        elif fault.kind == "cut":
            await _cut(send, b"")
        elif fault.kind == "late":
            await asyncio.sleep(fault.seconds)
            await self._app(scope, receive, send)
        elif fault.kind == "drip":
            await _drip(receive, send, fault.seconds)
        else:
            status, body = await _collected(self._app, scope, receive)
            if fault.kind == "cut_body":
                await _cut(send, body[: len(body) // 2])
            else:
                await _answer(send, status, json.dumps(edited(json.loads(body), fault.edit)).encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _cut(send: Send, body: bytes) -> None:
    # The server closes the connection when the application ends before the length that it promised.
    headers = [(b"content-type", b"application/json"), (b"content-length", b"1000000")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _drip(receive: Receive, send: Send, seconds: float) -> None:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not leaving.done():
        await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await asyncio.wait({leaving}, timeout=seconds)


async def _collected(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, bytes]:
    status, parts = 500, []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def edited(reply: Any, edit: str) -> Any:
    """Change a reply as a broken server does.

    "short_logprobs" loses one, "null_logprobs" and "true_logprobs" replace the last, "nan_logprobs" too, "floor" puts
    the lowest there, "no_logprobs" takes all away, "abort" says that it was aborted and has no tokens.
    """
    if "choices" in reply:
        return _edited_choice(reply, edit)
    return _edited_sglang(reply, edit)


_VALUES = {"null_logprobs": None, "true_logprobs": True, "nan_logprobs": float("nan"), "floor": -9999.0}


def _edited_choice(reply: dict[str, Any], edit: str) -> dict[str, Any]:
    choice = reply["choices"][0]
    logprobs = choice.get("logprobs")
    entries = logprobs and (logprobs.get("content") or logprobs.get("token_logprobs"))
    if edit == "abort":
        choice |= {"finish_reason": "abort", "token_ids": [], "logprobs": None, "weight_versions": []}
        if "text" in choice:
            choice["text"] = ""
    elif edit == "no_logprobs":
        choice["logprobs"] = None
    elif edit == "short_logprobs":
        entries.pop()
    elif isinstance(entries[-1], dict):
        entries[-1]["logprob"] = _VALUES[edit]
    else:
        entries[-1] = _VALUES[edit]
    return reply


def _edited_sglang(reply: dict[str, Any], edit: str) -> dict[str, Any]:
    meta = reply["meta_info"]
    triples = meta.get("output_token_logprobs")
    if edit == "abort":
        meta["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta |= {"output_token_logprobs": [], "completion_tokens": 0, "weight_versions": []}
        reply |= {"output_ids": [], "text": ""}
    elif edit == "no_logprobs":
        del meta["output_token_logprobs"]
    elif edit == "short_logprobs":
        triples.pop()
    else:
        triples[-1][0] = _VALUES[edit]
    return reply
