"""Frames: plain data to bytes and back, as JSON or MessagePack; long messages are parsed in pieces.

Parsers of JSON and MessagePack read a message in one go while no other thread runs, and take tens of milliseconds for
a megabyte of the smallest values. In pieces, other tasks of the event loop have turns in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from time import perf_counter
from typing import Any, NoReturn, cast

import msgpack
import orjson

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.json_text import read_json

MEDIA_TYPES = {False: "application/json", True: "application/msgpack"}
"""The HTTP content type by `binary`."""

SUBPROTOCOLS = {False: "rollgym.v1.json", True: "rollgym.v1.msgpack"}
"""The WebSocket subprotocol by `binary`."""

_names = {False: "JSON", True: "MessagePack"}


def dumps(obj: Any, *, binary: bool) -> bytes:
    """Serialise plain data; values went through `encode_value` before.

    Raises:
        EncodeError: It contains a value that the encoding cannot represent: too deeply nested lists, numbers or texts
            out of range, objects. Encodings differ in what they bear, so that what was read as one may be no other.
    """
    try:
        if binary:
            # Only a packer that keeps its output returns None, and this one does not.
            return cast(bytes, msgpack.packb(obj))
        return orjson.dumps(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(f"cannot be written as {_names[binary]}: {error}") from error


def loads(data: bytes | str, *, binary: bool) -> Any:
    """Read plain data from a frame.

    Integers are exact in either encoding, even beyond the range of values; the decoder of values refuses those.

    Raises:
        DecodeError: The frame is not valid JSON or MessagePack, or uses a MessagePack extension type.
    """
    try:
        if binary:
            return msgpack.unpackb(data, ext_hook=_refuse_extension, timestamp=0)
        return read_json(data)
    except DecodeError:
        raise
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not a valid {_names[binary]} frame: {error}") from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise DecodeError(f"MessagePack extension type {code} is not part of the protocol")


LONG = 2**17
"""A shorter message takes a few milliseconds at most to parse in one go."""

_PIECE = 2**15
_SLICE_S = 0.005
# As deep as the readers go themselves.
_MAX_DEPTH = 1024
# Deeper values are parsed in one go.
_MOST_OPEN = 32
_BLANK = b" \t\r\n"
_BLANKS = re.compile(rb"[ \t\r\n]*")
# A text that does not end in what is looked at has no second quotation mark.
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*("?)|[\[\]{},]', re.DOTALL)
_ARRAY, _OBJECT, _TEXT = b'[{"'
_OPENING, _CLOSING = b"[{", b"]}"
_OTHER_BRACKET = {_ARRAY: b"]", _OBJECT: b"}"}

Reading = Generator[None, None, Any]
"""Yields after each piece, and returns the value."""


async def read_long(data: bytes, *, binary: bool) -> Any:
    """Read plain data, as `loads` does, in slices of the event loop's time.

    Raises:
        DecodeError: It is not valid.
    """
    reading = read_in_pieces(data, binary=binary)
    end = perf_counter() + _SLICE_S
    while True:
        try:
            next(reading)
        except StopIteration as read:
            return read.value
        if perf_counter() >= end:
            await asyncio.sleep(0)
            end = perf_counter() + _SLICE_S


def read_in_pieces(data: bytes, *, binary: bool) -> Reading:
    """Read plain data, as `loads` does, a piece at a time.

    Raises:
        DecodeError: It is not valid.
    """
    return _read_messagepack(data) if binary else _Json(data).read()


def _read_messagepack(data: bytes) -> Reading:
    unpacker = msgpack.Unpacker(ext_hook=_refuse_extension, timestamp=0, max_buffer_size=len(data))
    for end in range(_PIECE, len(data) + _PIECE, _PIECE):
        unpacker.feed(data[end - _PIECE : end])
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData:
            yield
            continue
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DecodeError(f"not a valid MessagePack frame: {error}") from error
        if unpacker.tell() < len(data):
            raise DecodeError("not a valid MessagePack frame: something follows the value")
        return value
    raise DecodeError("not a valid MessagePack frame: it is cut off")


class _Container:
    """An array or an object that has begun and not ended.

    Attributes:
        bracket: The opening bracket.
        content: The elements read so far.
        may_end: Whether no comma precedes the next token.
        needs_comma: Whether the next token, if not the closing bracket, is a comma.
    """

    __slots__ = ("bracket", "content", "may_end", "needs_comma")

    def __init__(self, bracket: int) -> None:
        self.bracket = bracket
        self.content: Any = [] if bracket == _ARRAY else {}
        self.may_end = True
        self.needs_comma = False


class _Json:
    """Reads JSON in runs: sequences of elements within one array or object.

    A piece that is cut at a comma and can be read is a run: if the comma stood in a text, or in something nested, this
    would have no end. If a piece cannot be parsed, its texts and brackets are scanned one by one.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._open: list[_Container] = []

    def read(self) -> Reading:
        """Parse the text piece by piece, and return its value."""
        data = self._data
        self._at = len(data) - len(data.lstrip(_BLANK))
        if data[self._at : self._at + 1] not in (b"[", b"{"):
            return loads(data, binary=False)
        root = self._begin(self._at)
        while self._open:
            self._take_comma()
            if not self._take_piece():
                yield from self._take_tokens()
            yield
        if data[self._at :].strip(_BLANK):
            raise _invalid("something follows the value")
        return root.content

    def _take_comma(self) -> None:
        """Skip the comma after a nested value, if there is one."""
        data, top = self._data, self._open[-1]
        if not top.needs_comma:
            return
        blanks = _BLANKS.match(data, self._at)
        assert blanks is not None
        self._at = blanks.end()
        if data[self._at : self._at + 1] == b",":
            self._at += 1
            top.needs_comma = top.may_end = False

    def _take_piece(self) -> bool:
        """Take a piece up to a comma, if it can be read."""
        comma = self._data.rfind(b",", self._at, self._at + _PIECE)
        if comma <= self._at or self._open[-1].needs_comma:
            return False
        try:
            self._take_run(comma)
        except DecodeError:
            return False
        self._pass_comma(comma)
        return True

    def _take_tokens(self) -> Generator[None]:
        """Take the complete tokens of a piece, up to the end of the innermost open array or object at most."""
        data, at = self._data, self._at
        opened: list[tuple[int, int]] = []
        comma = text = -1
        while comma < 0 or opened:
            end = min(at + _PIECE, len(data))
            if at == end:
                raise _invalid("it is cut off")
            for token in _TOKEN.finditer(data, at, end):
                place, sign = token.start(), data[token.start()]
                if sign == _TEXT:
                    text = place
                    if not token[1]:
                        end = yield from self._end_of_text(place)
                        break
                elif sign in _OPENING:
                    opened.append((place, text))
                    text = -1
                elif sign in _CLOSING:
                    if not opened:
                        self._end(place)
                        return
                    opened.pop()
                    text = -1
                elif not opened:
                    comma = place
            depth = len(self._open) + len(opened)
            if depth > _MAX_DEPTH:
                raise _invalid("it is nested too deep")
            if opened and depth <= _MOST_OPEN:
                for place, text in opened:
                    self._descend(place, text)
                return
            at = end
            yield
        self._take_run(comma)
        self._pass_comma(comma)

    def _end_of_text(self, place: int) -> Generator[None, None, int]:
        """Give where a text ends that begins there."""
        data, at = self._data, place + 1
        while at < len(data):
            # Signs that are escaped are put out of the way; the last one may be half of an escape.
            piece = data[at : at + _PIECE].replace(b"\\\\", b"__").replace(b'\\"', b"__")
            found = piece.find(b'"')
            if found >= 0:
                return at + found + 1
            at += len(piece) - (piece.endswith(b"\\") and len(piece) > 1)
            yield
        return at

    def _begin(self, place: int) -> _Container:
        container = _Container(self._data[place])
        self._open.append(container)
        self._at = place + 1
        return container

    def _descend(self, place: int, text: int) -> None:
        """Enter a nested value, after the elements before it; in an object, its name is the last text."""
        data, top = self._data, self._open[-1]
        name = None
        start = place
        if top.bracket == _OBJECT:
            start = text
            label = data[start:place].rstrip(_BLANK) if start >= self._at else b""
            if not label.endswith(b":"):
                raise self._unreadable()
            name = loads(label[:-1], binary=False)
        before = data[self._at : start].strip(_BLANK)
        if before and not before.endswith(b","):
            raise self._unreadable()
        if before:
            comma = data.rindex(b",", self._at, start)
            self._take_run(comma)
            self._pass_comma(comma)
        elif top.needs_comma:
            raise self._unreadable()
        top.may_end = top.needs_comma = True
        nested = self._begin(place).content
        if name is None:
            top.content.append(nested)
        else:
            top.content[name] = nested

    def _end(self, place: int) -> None:
        """Take the rest of the innermost array or object that is open."""
        top = self._open[-1]
        if self._data[place : place + 1] != _OTHER_BRACKET[top.bracket]:
            raise self._unreadable()
        if self._data[self._at : place].strip(_BLANK):
            self._take_run(place)
        elif not top.may_end:
            raise self._unreadable()
        self._open.pop()
        self._at = place + 1

    def _take_run(self, end: int) -> None:
        """Take the run of elements from here on; in brackets, at its depth, it is a value by itself."""
        run, top, around = self._data[self._at : end], self._open[-1], len(self._open) - 1
        if top.needs_comma or not run.strip(_BLANK):
            raise self._unreadable()
        content = loads(
            b"".join((b"[" * around, bytes((top.bracket,)), run, _OTHER_BRACKET[top.bracket], b"]" * around)),
            binary=False,
        )
        for _ in range(around):
            if len(content) != 1:
                # It has closed its container, and opened a similar one.
                raise self._unreadable()
            content = content[0]
        if top.bracket == _ARRAY:
            top.content += content
        else:
            top.content.update(content)

    def _pass_comma(self, place: int) -> None:
        self._at = place + 1
        self._open[-1].may_end = False

    def _unreadable(self) -> DecodeError:
        return _invalid(f"what stands at byte {self._at} or after it cannot be read")


def _invalid(reason: str) -> DecodeError:
    return DecodeError(f"not a valid JSON frame: {reason}")
