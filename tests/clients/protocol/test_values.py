"""Values and spaces survive the wire in both encodings."""

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.clients.protocol.arrays import LIST_LIMIT, MediaBytes
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.clients.protocol.spaces import UnicodeText, describe_space, parse_space
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value, encode_value

ENCODINGS = [False, True]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOAT_DTYPES = [np.float16, np.float32, np.float64]
INTEGER_DTYPES = [np.int8, np.int32, np.int64, np.uint8, np.uint16, np.uint64]


def through(space: Any, value: Any, binary: bool) -> Any:
    return decode_value(
        space, loads(dumps(encode_value(space, value, binary=binary), binary=binary), binary=binary)
    )


def described(space: Any, binary: bool) -> Any:
    return parse_space(loads(dumps(describe_space(space), binary=binary), binary=binary))


def equal(first: Any, second: Any) -> bool:
    """Equality that takes NaN as equal to itself and wants equal dtypes and shapes."""
    if isinstance(first, np.ndarray):
        second = np.asarray(second)  # a Box without dimensions samples a scalar
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, float) and math.isnan(first):
        return isinstance(second, float) and math.isnan(second)
    return bool(first == second)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = draw(st.sampled_from([*FLOAT_DTYPES, *INTEGER_DTYPES]))
    low, high = (
        (0, 100)
        if np.issubdtype(dtype, np.integer)
        else draw(st.sampled_from([(-1.0, 1.0), (-math.inf, math.inf), (0.25, math.inf)]))
    )
    return spaces.Box(low=low, high=high, shape=shape, dtype=dtype)


LEAVES = st.one_of(
    st.just(UnicodeText()),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-9, 9)),
    st.builds(lambda n: spaces.Discrete(n, dtype=np.int32), st.integers(1, 9)),
    st.builds(
        lambda n, start: spaces.MultiDiscrete(n, start=[start] * len(n)),
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.integers(-5, 5),
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 6) | st.lists(st.integers(1, 3), min_size=1, max_size=3)),
    st.builds(
        lambda size, charset: spaces.Text(size, min_length=0, charset=charset),
        st.integers(0, 5),
        st.sampled_from(["ab", "é√漢", "<a>"]),
    ),
    boxes(),
)
BOX_LIKE = st.one_of(
    st.builds(spaces.Discrete, st.integers(2, 5)),
    st.builds(lambda n: spaces.Box(-1, 1, (n,)), st.integers(1, 3)),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda parts: spaces.Dict(list(parts.items())),
            st.dictionaries(TEXT, inner, min_size=1, max_size=3),
        ),
        st.builds(spaces.OneOf, st.lists(inner, min_size=1, max_size=3)),
        st.builds(spaces.Sequence, inner),
        st.builds(lambda part: spaces.Sequence(part, stack=True), BOX_LIKE),
        st.builds(spaces.Graph, BOX_LIKE, st.none() | BOX_LIKE),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(SPACES, st.integers(0, 2**32 - 1), st.sampled_from(ENCODINGS))
def test_every_space_and_its_samples_survive(space: Any, seed: int, binary: bool) -> None:
    assert described(space, binary) == space
    space.seed(seed)
    for _ in range(3):
        sample = space.sample()
        assert equal(through(space, sample, binary), sample)
        assert through(space, sample, binary) in space


@pytest.mark.parametrize("binary", ENCODINGS)
def test_a_dict_space_keeps_the_order_of_its_keys(binary: bool) -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    assert list(described(space, binary).spaces) == ["z", "a"]


@pytest.mark.parametrize("binary", ENCODINGS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", [3, LIST_LIMIT + 1])
def test_floats_that_are_not_finite_survive(binary: bool, dtype: Any, size: int) -> None:
    space = spaces.Box(-np.inf, np.inf, (size,), dtype)
    value = np.resize(np.array([np.nan, np.inf, -np.inf, 0.1], dtype), size)
    assert equal(through(space, value, binary), value)


def test_names_stand_for_floats_that_are_not_finite() -> None:
    space = spaces.Box(-np.inf, np.inf, (2, 2), np.float64)
    value = np.array([[np.nan, np.inf], [-np.inf, 1.5]])
    assert encode_value(space, value, binary=False) == [["NaN", "Infinity"], ["-Infinity", 1.5]]
    assert encode_value(None, {"a": math.inf}, binary=False) == {"a": "Infinity"}
    assert encode_value(None, {"a": math.inf}, binary=True) == {"a": math.inf}


def test_arrays_become_bytes_above_the_limit_only() -> None:
    small, large = (spaces.Box(0, 255, (size,), np.uint8) for size in (LIST_LIMIT, LIST_LIMIT + 1))
    assert isinstance(encode_value(small, small.sample(), binary=False), list)
    encoded = encode_value(large, large.sample(), binary=False)
    assert encoded["__nd__"][:2] == ["uint8", [LIST_LIMIT + 1]]
    assert isinstance(encoded["__nd__"][2], str)
    assert isinstance(encode_value(small, small.sample(), binary=True)["__nd__"][2], bytes)


@pytest.mark.parametrize("binary", ENCODINGS)
def test_integers_that_json_readers_would_round_go_as_bytes(binary: bool) -> None:
    space = spaces.Box(-(2**62), 2**62, (2,), np.int64)
    value = np.array([2**53 + 1, -(2**53) - 1])
    assert equal(through(space, value, binary), value)
    assert described(space, binary) == space


@pytest.mark.parametrize("binary", ENCODINGS)
def test_either_encoding_of_an_array_is_read(binary: bool) -> None:
    space = spaces.Box(0, 1, (2,), np.float32)
    expected = np.array([0, 1], np.float32)
    on_request = encode_value(None, expected, binary=binary)
    for wire in ([0, 1], [0.0, 1.0], on_request):
        assert equal(decode_value(space, wire), expected)


FREE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXT.filter(lambda key: not key.startswith("__")), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(FREE, st.sampled_from(ENCODINGS))
def test_free_form_values_survive(value: Any, binary: bool) -> None:
    assert equal(through(None, value, binary), value)


@pytest.mark.parametrize("binary", ENCODINGS)
def test_infos_keep_arrays_and_images(binary: bool) -> None:
    info = {
        "mask": np.array([1, 0], np.int8),
        "scalar": np.float32(0.5),
        "flag": np.True_,
        "names": np.array(["a", "b"]),
        "picture": MediaBytes(b"\x89PNG", "image/png"),
        "raw": b"\x00\xff",
        7: (1, 2),
    }
    back = through(None, info, binary)
    assert data_equivalence(back.pop("mask"), info["mask"])
    picture = back.pop("picture")
    assert (picture, picture.media_type) == (b"\x89PNG", "image/png")
    assert back == {"scalar": 0.5, "flag": True, "names": ["a", "b"], "raw": b"\x00\xff", "7": [1, 2]}


@pytest.mark.parametrize(
    ("space", "wire"),
    [
        (spaces.Discrete(2), True),
        (spaces.Discrete(2), 1.0),
        (spaces.Discrete(2), "1"),
        (UnicodeText(), 1),
        (UnicodeText(), None),
        (spaces.Box(0, 1, (2,)), [1, "2"]),
        (spaces.Box(0, 1, (2,)), [[1, 2]]),
        (spaces.Box(0, 1, (2,)), [1]),
        (spaces.Box(0, 1, (2,)), [1, [2]]),
        (spaces.Box(0, 1, (2,)), {"a": 1}),
        (spaces.Box(0, 1, (2,)), None),
        (spaces.Box(0, 255, (1,), np.uint8), [256]),
        (spaces.Box(0, 255, (1,), np.uint8), [0.5]),
        (spaces.Box(0, 255, (1,), np.uint8), [10**30]),
        (spaces.Box(0, 255, (1,), np.uint8), {"__nd__": ["uint8", [2], "AA=="]}),
        (spaces.Box(0, 255, (1,), np.uint8), {"__nd__": ["uint8", [10**12], ""]}),
        (spaces.Box(0, 255, (1,), np.uint8), {"__nd__": ["object", [1], "AA=="]}),
        (spaces.Box(0, 255, (1,), np.uint8), {"__nd__": ["uint8", [1], "!"]}),
        (spaces.Box(0, 255, (1,), np.uint8), {"__nd__": ["uint8", [1] * 70, "AA=="]}),
        (spaces.Box(-1, 1, (2,)), [True, 0]),
        (spaces.Box(-1, 1, (2, 2)), [[0, 0], [0.5, False]]),
        (spaces.Box(-(2**62), 2**62, (1,), np.int64), [2**53]),
        (None, 2**53),
        (None, {"a": [-(2**53)]}),
        (spaces.Dict(a=spaces.Discrete(2)), {}),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": 0, "b": 0}),
        (spaces.Tuple([spaces.Discrete(2)]), [0, 0]),
        (spaces.Sequence(spaces.Discrete(2)), 0),
        (spaces.OneOf([spaces.Discrete(2)]), [1, 0]),
        (spaces.Graph(spaces.Discrete(2), None), {"nodes": [0], "edges": [0], "edge_links": [[0, 0]]}),
        (None, {"__nd__": 1}),
        (None, {"__bytes__": ["a"]}),
    ],
)
def test_what_does_not_fit_is_refused(space: Any, wire: Any) -> None:
    with pytest.raises(DecodeError):
        decode_value(space, wire)


def test_an_empty_list_fits_a_sequence_stacked_or_not() -> None:
    stacked = decode_value(spaces.Sequence(spaces.Discrete(4), stack=True), [])
    assert (stacked.shape, stacked.dtype) == ((0,), np.int64)
    assert decode_value(spaces.Sequence(spaces.Discrete(4)), []) == ()


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (UnicodeText(), 1),
        (UnicodeText(), "\ud800"),
        (spaces.Discrete(2), "1"),
        (spaces.Discrete(2), 2**53),
        (spaces.Box(0, 1, (2,)), np.zeros(3)),
        (spaces.Box(0, 1, (2,)), "ab"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}),
        (None, {"a": object()}),
        (None, {1: "a", "1": "b"}),
        (None, 2**53),
    ],
)
def test_what_has_no_form_on_the_wire_is_an_error(space: Any, value: Any) -> None:
    with pytest.raises(EncodeError):
        encode_value(space, value, binary=False)


@pytest.mark.parametrize("levels", [201, 300, 100_000])
def test_deep_nesting_is_refused_and_not_fatal(levels: int) -> None:
    deep: Any = 0
    for number in range(levels):
        deep = [deep] if number % 2 else {"a": deep}
    with pytest.raises(EncodeError):
        encode_value(None, deep, binary=True)
    with pytest.raises(DecodeError):
        decode_value(None, deep)


@pytest.mark.parametrize("binary", [False, True])
def test_what_is_not_too_deep_fits_into_a_frame(binary: bool) -> None:
    deep: Any = 0
    for number in range(200):
        deep = [deep] if number % 2 else {"a": deep}
    frame = {"id": 1, "results": [{"ok": {"info": encode_value(None, deep, binary=binary)}}]}
    [result] = loads(dumps(frame, binary=binary), binary=binary)["results"]
    assert decode_value(None, result["ok"]["info"]) == deep


@pytest.mark.parametrize(
    ("data", "binary"),
    [
        (b"{", False),
        (b"\xff", False),
        (b"NaN", False),
        (b"\xc1", True),
        (b"\xd4\x05\x00", True),
        (b"\x92\x01", True),
        (b"\x01\x01", True),
    ],
)
def test_broken_frames_are_refused(data: bytes, binary: bool) -> None:
    with pytest.raises(DecodeError):
        loads(data, binary=binary)


@pytest.mark.parametrize(
    "description",
    [
        None,
        {},
        {"type": "Nope"},
        {"type": "Discrete"},
        {"type": "Discrete", "n": 0},
        {"type": "Box", "shape": [-1], "dtype": "float32", "low": 0, "high": 1},
        {"type": "Tuple", "spaces": 3},
    ],
)
def test_broken_descriptions_of_spaces_are_refused(description: Any) -> None:
    with pytest.raises(DecodeError):
        parse_space(description)


def test_unicode_text_is_seedable_and_holds_every_string() -> None:
    first, second = UnicodeText(seed=3), UnicodeText(seed=3)
    assert [first.sample() for _ in range(5)] == [second.sample() for _ in range(5)]
    assert "" in first
    assert "漢\n\x00" in first
    assert 3 not in first
    assert UnicodeText() != spaces.Text(3)


@pytest.mark.parametrize("numbers", [[0.5, 1.0], [float("nan"), 0.0], [300, 0], [-1, 0]])
def test_numbers_that_whole_ones_cannot_hold_are_refused_and_not_changed(numbers):
    space = spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(EncodeError, match=r"not an array of uint8: its .* numbers do not fit"):
        encode_value(space, np.array(numbers), binary=False)


def test_whole_numbers_of_another_type_are_the_same_numbers():
    space = spaces.Box(0, 255, (2,), np.uint8)
    for kind in (np.float64, np.int64, np.uint8):
        wire = encode_value(space, np.array([7, 255], kind), binary=False)
        assert decode_value(space, wire).tolist() == [7, 255]
