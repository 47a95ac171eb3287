"""Frames of messages, read and written beside the protocol of `websockets`: as that would have done it."""

from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from rollgym.clients.net.framing import (
    BINARY,
    TEXT,
    FrameReader,
    masking_keys,
    to_client,
    to_server,
)

MOST_BYTES = 70_000
SIZES = (0, 1, 125, 126, 127, 300, 65_535, 65_536, MOST_BYTES)
Event = tuple[int, bytes, bool]


def _server() -> Protocol:
    protocol = ServerProtocol(state=State.OPEN, max_size=MOST_BYTES)
    # A server's own begins with the request of a handshake.
    protocol.parser = Protocol.parse(protocol)
    next(protocol.parser)
    return protocol


def _client() -> Protocol:
    protocol = ClientProtocol(parse_uri("ws://here/"), state=State.OPEN, max_size=MOST_BYTES)
    protocol.parser = Protocol.parse(protocol)
    next(protocol.parser)
    return protocol


def _events(protocol: Protocol) -> list[Event]:
    return [
        (int(event.opcode), bytes(event.data), event.fin)
        for event in protocol.events_received()
        if isinstance(event, Frame)
    ]


class Reading:
    """A reader, and what came of its data, whoever has read it."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.events: list[Event] = []
        self.passed_on = 0
        self.reader = FrameReader(
            protocol,
            most_bytes=MOST_BYTES,
            on_message=lambda opcode, content: self.events.append((opcode, content, True)),
            pass_on=self._pass_on,
        )

    def _pass_on(self, data: bytes) -> None:
        self.passed_on += len(data)
        self.protocol.receive_data(data)
        self.events += _events(self.protocol)


def _frames(*, masked: bool) -> st.SearchStrategy[bytes]:
    contents = st.binary(max_size=20) | st.sampled_from(SIZES).map(bytes)

    def frame(opcode: int, content: bytes, fin: bool) -> bytes:
        return Frame(Opcode(opcode), content, fin).serialize(mask=masked)

    message = st.builds(frame, st.sampled_from((TEXT, BINARY)), contents, st.just(True))
    fragment = st.builds(frame, st.sampled_from((0, TEXT, BINARY)), contents, st.booleans())
    control = st.builds(frame, st.sampled_from((9, 10)), st.binary(max_size=125), st.just(True))
    close = st.sampled_from((b"", b"\x03\xe8", b"\x03\xe8bye", b"\x00")).map(
        lambda said: frame(8, said, True)
    )
    too_large = st.just(frame(BINARY, bytes(MOST_BYTES + 1), True))
    other_side = st.just(Frame(Opcode.TEXT, b"masked as the other side would").serialize(mask=not masked))
    reserved = st.sampled_from((b"\xc1\x81abcda", b"\x83\x80abcd", b"\x09\x80abcd", b"\x89\xfe\x00\x7eabcd"))
    vast = st.just(b"\x82" + bytes([0x7F | 0x80 * masked]) + b"\x7f" + b"\xff" * 7)
    odd = too_large | other_side | reserved | vast | st.binary(min_size=1, max_size=8)
    return st.one_of(message, message, message, message, fragment, fragment, control, close, odd)


@pytest.mark.parametrize("side", [_server, _client])
@given(st.data())
def test_whatever_comes_is_read_as_the_protocol_would_alone(side, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    alone, reading = side(), Reading(side())
    sent = b"".join(data.draw(st.lists(_frames(masked=side is _server), max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=8))
    expected: list[Event] = []
    for begin, end in pairwise(sorted({0, len(sent), *cuts})):
        alone.receive_data(sent[begin:end])
        expected += _events(alone)
        reading.reader.feed(sent[begin:end])
    assert reading.events == expected
    # A head that has not come whole is not looked at yet; whatever is wrong with it shows with its last byte.
    if alone.state is reading.protocol.state:
        # A client's frames are masked with keys that differ.
        assert list(map(len, reading.protocol.data_to_send())) == list(map(len, alone.data_to_send()))
        assert reading.protocol.close_sent == alone.close_sent
        assert type(reading.protocol.parser_exc) is type(alone.parser_exc)
    else:
        reading.reader.feed(bytes(14))
        assert reading.protocol.state is alone.state


@pytest.mark.parametrize("side", [_server, _client])
def test_messages_of_one_frame_need_no_protocol(side) -> None:  # type: ignore[no-untyped-def]
    reading = Reading(side())
    messages = [(TEXT, "é".encode()), *((BINARY, bytes(size)) for size in SIZES)]
    sent = b"".join(
        Frame(Opcode(opcode), content).serialize(mask=side is _server) for opcode, content in messages
    )
    reading.reader.feed(sent)
    assert reading.events == [(opcode, content, True) for opcode, content in messages]
    assert reading.passed_on == 0


def test_a_larger_message_is_refused_until_it_is_allowed() -> None:
    frame = to_server(BINARY, bytes(MOST_BYTES + 1), b"keys")
    reading = Reading(_server())
    reading.reader.most_bytes *= 2
    reading.reader.feed(frame)
    assert [len(content) for _, content, _ in reading.events] == [MOST_BYTES + 1]
    reading.reader.most_bytes = MOST_BYTES
    reading.reader.feed(frame)
    assert reading.protocol.close_sent is not None
    assert reading.protocol.close_sent.code == 1009


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_what_is_written_is_what_the_protocol_reads(opcode: int, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    server, client = _server(), _client()
    server.receive_data(to_server(opcode, content, b"\x01\x80\xff\x00"))
    client.receive_data(to_client(opcode, content))
    assert _events(server) == _events(client) == [(opcode, content, True)]
    assert to_client(opcode, content) == Frame(Opcode(opcode), content).serialize(mask=False)


def test_masking_keys_do_not_come_again() -> None:
    keys: Iterator[bytes] = masking_keys()
    taken = list(islice(keys, 5000))
    assert {len(key) for key in taken} == {4}
    assert len(set(taken)) > 4990
