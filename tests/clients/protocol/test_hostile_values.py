"""What a peer sent is looked at before anything is built of it: refusing costs as much as it is long."""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.clients.protocol.arrays import DecodeError, decode_array, decode_nd
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import decode_value

LONG = "x" * 200_000
BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


def deep(levels: int, inside: Any = 0.0) -> Any:
    for _ in range(levels):
        inside = [inside]
    return inside


HOSTILE: dict[str, Callable[[int], Any]] = {
    "one long text among empty ones": lambda size: ["x" * (size // 2), *[""] * (size // 6)],
    "a long text": lambda size: "x" * size,
    "texts": lambda size: ["x"] * (size // 4),
    "a number of many digits among texts": lambda size: [*["NaN"] * (size // 6), "9" * 100],
    "lists of unequal lengths": lambda size: [[0.0], *[[0.0, 0.0]] * (size // 10)],
    "one text among numbers": lambda size: [*[0.0] * (size // 4), "x"],
    "a boolean among numbers": lambda size: [*[0] * (size // 3), True],
    "many numbers": lambda size: [0.5] * (size // 4),
    "many empty lists": lambda size: [[]] * (size // 3),
    "empty lists in pairs": lambda size: [[[], []]] * (size // 8),
    "deep lists": lambda size: deep(900),
    "wide and then deep": lambda size: [deep(30)] * (size // 62),
    "null": lambda size: [None] * (size // 5),
    "objects": lambda size: [{}] * (size // 3),
    "a shape of many sizes": lambda size: {"__nd__": ["float32", [2**60] * (size // 20), ""]},
    "a long name of a dtype": lambda size: {"__nd__": ["x" * size, [1], ""]},
    "a shape beyond all memory": lambda size: {"__nd__": ["float32", [2**40, 2**40], "A" * (size // 4 * 4)]},
    "no element of a shape beyond all memory": lambda size: {"__nd__": ["float32", [0, 2**62, 2**62], ""]},
    "bytes that are none": lambda size: {"__nd__": ["float32", [1], "!" * size]},
}
SPACES: dict[str, spaces.Space[Any]] = {
    "Box": BOX,
    "MultiDiscrete": spaces.MultiDiscrete([3, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "Discrete": spaces.Discrete(4),
    "Dict": spaces.Dict(a=BOX),
    "Tuple": spaces.Tuple([BOX, BOX]),
    "OneOf": spaces.OneOf([BOX, spaces.Discrete(2)]),
    "Sequence": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "Graph": spaces.Graph(BOX, None),
}


def refuse(space: spaces.Space[Any], wire: Any) -> None:
    with pytest.raises(DecodeError) as refused:
        decode_value(space, wire)
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))
@pytest.mark.parametrize("kind", HOSTILE)
def test_refusing_takes_no_more_memory_than_what_is_refused(kind: str, space: spaces.Space[Any]) -> None:
    wire = loads(dumps(HOSTILE[kind](200_000), binary=True), binary=True)
    if isinstance(space, spaces.Sequence) and wire == []:
        return
    tracemalloc.start()
    refuse(space, wire)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 200_000


@pytest.mark.parametrize("kind", HOSTILE)
def test_refusing_takes_time_in_proportion(kind: str) -> None:
    def cost(size: int) -> float:
        wire = HOSTILE[kind](size)
        begun = time.process_time()
        refuse(BOX, wire)
        return time.process_time() - begun

    if cost(800_000) > 0.02:
        assert min(cost(800_000) for _ in range(5)) < 8 * min(cost(200_000) for _ in range(5)) + 0.02


NUMBERS = (
    st.integers(-(2**60), 2**60) | st.floats() | st.booleans() | st.sampled_from(["NaN", "Infinity", "1", ""])
)
NESTED = st.recursive(
    NUMBERS | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, min_size=2, max_size=2),
    max_leaves=12,
)
DTYPES = st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]).map(np.dtype)
SHAPES = st.sampled_from([(), (1,), (2,), (2, 2), (0,), (0, 3), (1, 2, 1)])


@settings(max_examples=300)
@given(wire=NESTED, dtype=DTYPES, shape=SHAPES)
def test_lists_become_an_array_of_the_dtype_and_shape_or_are_refused(
    wire: Any, dtype: Any, shape: Any
) -> None:
    try:
        array = decode_array(wire, dtype, shape)
    except DecodeError:
        return
    assert (array.dtype, array.shape) == (dtype, shape)
    elements = list(leaves(wire))
    if array.size:
        values = [float(each) for each in elements] if dtype.kind == "f" else elements
        np.testing.assert_array_equal(array.reshape(-1), np.array(values, dtype=dtype))


def leaves(wire: Any) -> Iterator[Any]:
    if isinstance(wire, list):
        for part in wire:
            yield from leaves(part)
    else:
        yield wire


@given(array=st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=5))
def test_what_fits_is_taken(array: Any) -> None:
    names = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
    wire = [[names.get(str(each), each) for each in row] for row in array]
    decoded = decode_array(wire, np.dtype("float32"), (len(array), 2))
    np.testing.assert_array_equal(decoded, np.array(array, dtype="float32"))


@given(
    name=st.sampled_from(["float32", "bool", "str", ""]) | st.none() | st.lists(st.none(), max_size=1),
    shape=st.none() | st.lists(st.integers(-1, 2**63) | st.none() | st.booleans(), max_size=40),
    content=st.binary(max_size=16) | st.text(max_size=16) | st.none(),
)
def test_any_object_is_an_array_or_refused(name: Any, shape: Any, content: Any) -> None:
    for fields in ([name, shape, content], [name, shape], name):
        try:
            array = decode_nd({"__nd__": fields})
        except DecodeError:
            continue
        assert list(array.shape) == shape


@pytest.mark.parametrize(
    "description",
    [
        {"type": LONG},
        {"type": "Box", "shape": [2], "dtype": LONG, "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": ["float32"], "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": {"__nd__": []}, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": [LONG, *[""] * 30_000], "high": 1},
        {"type": "Box", "shape": [2] * 20_000, "dtype": "float32", "low": 0, "high": 1},
        {"type": "Box", "shape": [4096, 4096], "dtype": "float64", "low": 0, "high": 1},
        {"type": "Discrete", "n": 3, "dtype": "i4," * 50_000},
        {"type": "MultiDiscrete", "nvec": [LONG, *[""] * 30_000]},
        {"type": "MultiDiscrete", "nvec": [2, 2], "start": [0]},
        {"type": "MultiBinary", "n": [1] * 20_000},
        {"type": "Tuple", "spaces": [{"type": "Discrete", "n": 2}] * 20_000},
        {"type": "Dict", "spaces": LONG},
    ],
)
def test_descriptions_of_spaces_are_looked_at_before_they_are_built(description: Any) -> None:
    tracemalloc.start()
    with pytest.raises(DecodeError) as refused:
        parse_space(description)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8_000_000
    assert len(str(refused.value)) < 1_000


def test_a_space_within_a_thousand_others_is_refused() -> None:
    description: Any = {"type": "Discrete", "n": 2}
    for _ in range(1_000):
        description = {"type": "Tuple", "spaces": [description]}
    with pytest.raises(DecodeError, match="within each other"):
        parse_space(description)
