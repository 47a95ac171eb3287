"""Stands before the endpoint for agents and notes what each request asked for, and how it was answered."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(slots=True)
class Asked:
    """One request.

    Attributes:
        route: Its path, without the key of a session.
        fields: The fields of its body.
        stream: Whether it asked for a stream.
        forms: What it said of how replies must look, as `FIELD: KIND`.
        status: The status of the answer.
        ignored: What the answer names as ignored.
        error: The message of a refusal.
    """

    route: str
    fields: tuple[str, ...] = ()
    stream: bool = False
    forms: tuple[str, ...] = ()
    status: int = 0
    ignored: tuple[str, ...] = ()
    error: str = ""


class Witness:
    """An application around another one; `asked` has the requests in the order in which they came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.asked: list[Asked] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        asked = Asked("/" + path.split("/", 3)[-1] if path.startswith("/s/") else path)
        self.asked.append(asked)
        body, answer = bytearray(), bytearray()

        async def receiving() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked.status = message["status"]
                headers = {name.lower(): value.decode() for name, value in message["headers"]}
                asked.ignored = tuple(filter(None, headers.get(b"x-rollgym-ignored", "").split(", ")))
            elif asked.status >= 400:
                answer.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, receiving, sending)
        _note(asked, bytes(body), bytes(answer))


def _note(asked: Asked, body: bytes, answer: bytes) -> None:
    if body:
        read = json.loads(body)
        asked.fields, asked.stream = tuple(read), bool(read.get("stream"))
        asked.forms = tuple(_forms(read))
    if answer:
        asked.error = json.loads(answer)["error"]["message"]


def _forms(read: dict[str, Any]) -> Iterator[str]:
    for outer, inner in (
        ("response_format", None),
        ("output_format", None),
        ("text", "format"),
        ("output_config", "format"),
    ):
        form = read.get(outer) or {}
        form = form if inner is None else form.get(inner) or {}
        if form.get("type") not in (None, "text"):
            yield f"{outer if inner is None else f'{outer}.{inner}'}: {form['type']}"
    choice = read.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        yield f"tool_choice: {kind}"
