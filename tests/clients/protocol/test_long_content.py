"""What is read a piece at a time is what is read in one go, and is refused where that is refused."""

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.clients.protocol import frames
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.frames import loads, read_in_pieces

_TEXTS = st.text(st.characters(codec="utf-8")) | st.sampled_from(
    ['"', "\\", "],[", '"a":[', "{", "é\u2028", "\x00"]
)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | _TEXTS
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner), max_leaves=30
)
_NEVER = object()


def _read(data: bytes, *, binary: bool = False) -> tuple[Any, int]:
    """What is read, and in how many pieces."""
    pieces, reading = 0, read_in_pieces(data, binary=binary)
    while True:
        try:
            next(reading)
        except StopIteration as read:
            return read.value, pieces
        pieces += 1


def _outcome(data: bytes, *, whole: bool, binary: bool = False) -> Any:
    try:
        return loads(data, binary=binary) if whole else _read(data, binary=binary)[0]
    except DecodeError:
        return _NEVER


@pytest.fixture(autouse=True, scope="module", params=[2, 7, 64])
def _piece(request: pytest.FixtureRequest) -> Any:
    """How long a piece is."""
    before, frames._PIECE = frames._PIECE, request.param
    yield
    frames._PIECE = before


@settings(max_examples=60, deadline=None)
@given(_VALUES, st.sampled_from([None, 1]), st.booleans())
def test_json_is_read_as_in_one_go(value: Any, indent: int | None, ascii_only: bool) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    found, expected = _outcome(data, whole=False), _outcome(data, whole=True)
    assert repr(found) == repr(expected)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('[]{}:,"\\ 1a\n'), max_size=24))
def test_what_is_no_json_is_refused(text: str) -> None:
    data = text.encode()
    assert repr(_outcome(data, whole=False)) == repr(_outcome(data, whole=True))


@settings(max_examples=100, deadline=None)
@given(_VALUES, st.data())
def test_json_with_a_byte_more_or_less_or_another_is_refused_alike(value: Any, data: st.DataObject) -> None:
    content = json.dumps([value, {"a": [1, "b"]}]).encode()
    place = data.draw(st.integers(0, len(content) - 1))
    put = data.draw(st.sampled_from([b"", b",", b"]", b"[", b"}", b"{", b'"', b":", b"\\", b"0", b"\xff"]))
    damaged = content[:place] + put + content[place + data.draw(st.integers(0, 1)) :]
    assert repr(_outcome(damaged, whole=False)) == repr(_outcome(damaged, whole=True))


@settings(max_examples=40, deadline=None)
@given(_VALUES, st.integers(0, 8), st.binary(max_size=3))
def test_messagepack_is_read_as_in_one_go(value: Any, cut: int, more: bytes) -> None:
    try:
        content = msgpack.packb(value)
    except (OverflowError, UnicodeEncodeError):
        return
    data = content[: len(content) - cut] + more
    assert repr(_outcome(data, whole=False, binary=True)) == repr(_outcome(data, whole=True, binary=True))


@pytest.mark.parametrize(
    "data", [b"\xdd\xff\xff\xff\xff", b"\x81\x01\x02", b"\xc7\x01\x05a", b"\x91" * 2000 + b"\xc0", b"\xc1"]
)
def test_messagepack_that_lies_or_is_not_taken_is_refused(data: bytes) -> None:
    assert _outcome(data, whole=False, binary=True) is _NEVER
    assert _outcome(data, whole=True, binary=True) is _NEVER


@pytest.mark.parametrize("depth", [300, 1100, 10_000])
@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":[2],"b":', "},3]")])
def test_what_is_nested_is_read_as_deep_as_in_one_go(depth: int, before: str, after: str) -> None:
    data = (before * depth + "1" + after * depth).encode()
    found, expected = _outcome(data, whole=False), _outcome(data, whole=True)
    assert (found is _NEVER) == (expected is _NEVER)
    assert found is _NEVER or found == expected


@pytest.mark.parametrize(
    "data",
    [
        b'["' + b"a" * 300 + b'\\\\", "b"]',
        b'["' + b'\\"' * 151 + b'", {"' + b"n" * 99 + b'\\\\":[1]}]',
        b'["' + b"\\\\" * 150 + b'\\"]',
        b"[1" + b" " * 300 + b"," + b"2" * 300 + b"\n]",
        b'{"a":['
        + b"[" * 40
        + b"1," * 100
        + b"2"
        + b"]" * 40
        + b',"x"],"b":'
        + b'{"c":' * 50
        + b"3"
        + b"}" * 51,
    ],
)
def test_what_is_longer_than_a_piece_is_read(data: bytes) -> None:
    assert repr(_outcome(data, whole=False)) == repr(_outcome(data, whole=True))
