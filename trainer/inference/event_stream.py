"""Replies of servers as server-sent events: ids are told as they come, and at the end it is one answer. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from trainer.inference.calls import HttpAnswer, HttpCall

_DATA, _DONE = b"data:", b"[DONE]"


class StreamingDialect(Protocol):
    """The part of a dialect that is about streams."""

    def streaming(self, call: HttpCall) -> HttpCall:
        """Ask for the same as a stream."""
        ...

    def drawn(self, event: Mapping[str, Any]) -> Sequence[int]:
        """Return the ids that an event brings."""
        ...

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the server had answered without a stream."""
        ...


class ReplyEvents:
    """Reads the stream of one reply, which may be sent more than once.

    Args:
        dialect: How the server writes.
        on_tokens: Told of ids as they come.
    """

    def __init__(self, dialect: StreamingDialect, on_tokens: Callable[[Sequence[int]], object]) -> None:
        self._dialect = dialect
        self._on_tokens = on_tokens
        self._told = 0
        self._begin()

    def _begin(self) -> None:
        self._line = bytearray()
        self._events: list[Mapping[str, Any]] = []
        self._seen = 0

    def reading(self) -> Callable[[bytes], None]:
        """Begin; what was told of an earlier stream is not told again."""
        self._begin()
        return self._take

    def answer(self, answer: HttpAnswer) -> HttpAnswer:
        """Return an answer whose body was read as one that came without a stream."""
        if not answer.ok or not self._events:
            return answer
        for event in self._events:
            if "error" in event:
                return HttpAnswer(500, orjson.dumps(event))
        return HttpAnswer(answer.status, orjson.dumps(self._dialect.joined(self._events)))

    def _take(self, part: bytes) -> None:
        # Parts end anywhere: within a line, and within a character.
        *lines, rest = part.split(b"\n")
        for line in lines:
            self._line += line
            self._read(bytes(self._line))
            self._line.clear()
        self._line += rest

    def _read(self, line: bytes) -> None:
        data = line.removeprefix(_DATA).strip()
        if not line.startswith(_DATA) or data == _DONE:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = {
                "error": {
                    "message": f"an event of its stream is no JSON: {data[:80].decode(errors='replace')}"
                }
            }
        if not isinstance(event, dict):
            return
        self._events.append(event)
        ids = self._dialect.drawn(event)
        self._seen += len(ids)
        if self._seen > self._told:
            new, self._told = ids[self._told - self._seen :], self._seen
            self._on_tokens(new)
