"""Spaces on the wire: one schema per Gymnasium space type, and our own space of any text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from rollgym.clients.protocol.arrays import (
    DTYPES,
    MAX_DIMENSIONS,
    DecodeError,
    decode_array,
    encode_array,
    shown,
)

_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,<>/\n\"'{}é√漢😀"
_SAMPLE_MAX_LENGTH = 16
_LONGEST_MESSAGE = 200

MAX_ELEMENTS = 2**24
"""The largest number of elements of a space from the wire; observations of a larger one would fit no reply."""

MAX_BYTES = 2**26
"""The largest size of each of its two bounds, in bytes."""

MAX_SPACES = 2**14
"""The largest number of its parts, including nested ones."""

MAX_SPACE_DEPTH = 64
"""The largest depth of nested parts."""


class UnicodeText(Space[str]):
    """The space of all strings, the empty one included.

    Gymnasium's `Text` has a fixed alphabet and a maximum length; texts of language models have neither.

    Args:
        seed: Seed of the generator that `sample` uses.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text of any length has no flat array form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a short text of letters, digits, punctuation and a few characters beyond ASCII.

        Args:
            mask: Not supported; texts cannot be enumerated.
            probability: Not supported; texts cannot be enumerated.

        Raises:
            ValueError: A mask or probability was given.
        """
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample supports neither mask nor probability")
        length = int(self.np_random.integers(_SAMPLE_MAX_LENGTH + 1))
        picks = self.np_random.integers(len(_SAMPLE_ALPHABET), size=length)
        return "".join(_SAMPLE_ALPHABET[pick] for pick in picks)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a string."""
        return isinstance(x, str)

    def to_jsonable(self, sample_n: Any) -> list[Any]:
        """Return the samples as they are: strings are JSON already."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Return the samples as they are: strings are JSON already."""
        return list(sample_n)

    def __repr__(self) -> str:
        return "UnicodeText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)

    def __hash__(self) -> int:
        return 0x7E87


def describe_space(space: Space[Any]) -> dict[str, Any]:
    """Describe a space as a JSON-ready object; `parse_space` gives an equal space back.

    Raises:
        TypeError: The space is of a type that Gymnasium does not define, or has keys that are not strings.
    """
    for kind, describe in _DESCRIBERS:
        if isinstance(space, kind):
            return {"type": kind.__name__, **describe(space)}
    raise TypeError(f"a space of type {type(space).__name__} cannot be described on the wire")


def parse_space(description: Any) -> Space[Any]:
    """Build the space that `describe_space` described.

    Raises:
        DecodeError: The description is not of a known type or does not fit its schema.
    """
    check_size(description)
    return _parse(description)


def check_size(description: Any) -> None:
    """Refuse a space whose description is small but whose construction or sampling is large, before it is built.

    Raises:
        DecodeError: The space has too many elements, bytes or parts.
    """
    size, size_in_bytes, seen = 0, 0, 0
    parts = [(description, 0)]
    while parts:
        part, depth = parts.pop()
        if not isinstance(part, dict):
            continue
        seen += 1
        elements = _elements(part)
        size += elements
        size_in_bytes += elements * _item_size(part)
        if size > MAX_ELEMENTS or size_in_bytes > MAX_BYTES:
            raise DecodeError(f"the space has more than {MAX_ELEMENTS} elements, or {MAX_BYTES} bytes")
        if depth > MAX_SPACE_DEPTH or seen > MAX_SPACES:
            raise DecodeError(
                f"the space has more than {MAX_SPACES} parts, or {MAX_SPACE_DEPTH} within each other"
            )
        inner = part.get("spaces", ())
        within = list(inner.values()) if isinstance(inner, dict) else inner if isinstance(inner, list) else []
        parts.extend((each, depth + 1) for each in within)
        parts.extend((part.get(name), depth + 1) for name in ("space", "node_space", "edge_space"))


def _item_size(description: dict[str, Any]) -> int:
    name = description.get("dtype")
    return np.dtype(name).itemsize if isinstance(name, str) and name in DTYPES else 1


def _elements(description: dict[str, Any]) -> int:
    """How many elements a space has itself, without its parts; too many of them are not counted to the end."""
    kind = description.get("type")
    sizes: Any = []
    if kind == "Text":
        sizes = [description.get("max_length")]
    elif kind == "Box":
        sizes = description.get("shape")
    elif kind == "MultiBinary":
        sizes = description.get("n")
        sizes = [sizes] if type(sizes) is int else sizes
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        return 1  # its real type is checked when it is parsed
    if 0 in sizes:
        return 1
    elements = 1
    for size in sizes:
        elements *= abs(size)
        if elements > MAX_ELEMENTS:
            break
    return elements


def _parse(description: Any) -> Space[Any]:
    if not isinstance(description, dict):
        raise DecodeError(f"a space is described by an object, not by {type(description).__name__}")
    kind = description.get("type", "")
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise DecodeError(f"unknown space type {shown(kind)}")
    try:
        return parse(description)
    except DecodeError:
        raise
    except (
        *(KeyError, IndexError, TypeError, ValueError, AssertionError, AttributeError),
        *(RecursionError, OverflowError, MemoryError),
    ) as error:
        message = str(error)[:_LONGEST_MESSAGE]
        raise DecodeError(f"bad description of a {kind} space: {message}") from error


def _describe_bound(bound: np.ndarray[Any, Any]) -> Any:
    """Return one number if a bound is the same everywhere, which keeps images' spaces small."""
    first = bound.flat[0] if bound.size else bound.dtype.type(0)
    if bool((bound == first).all()):
        return encode_array(np.asarray(first), binary=False)
    return encode_array(bound, binary=False)


def _parse_bound(wire: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if isinstance(wire, list):
        return decode_array(wire, dtype, shape)
    bound = decode_array(wire, dtype, None)
    if bound.shape not in ((), shape):
        raise DecodeError(f"a bound has the shape {list(bound.shape)}, expected {list(shape)}")
    return np.broadcast_to(bound, shape).copy()


def _describe_box(space: spaces.Box) -> dict[str, Any]:
    return {
        "shape": list(space.shape),
        "dtype": space.dtype.name,
        "low": _describe_bound(space.low),
        "high": _describe_bound(space.high),
    }


def _parse_shape(wire: Any) -> tuple[int, ...]:
    if not isinstance(wire, list) or len(wire) > MAX_DIMENSIONS:
        raise DecodeError(f"a shape is a list of at most {MAX_DIMENSIONS} sizes")
    if not all(type(size) is int and 0 <= size < 2**31 for size in wire):
        raise DecodeError("a shape is a list of sizes")
    return tuple(wire)


def _parse_box(description: dict[str, Any]) -> Space[Any]:
    shape, dtype = _parse_shape(description["shape"]), _known_dtype(description["dtype"])
    return spaces.Box(
        low=_parse_bound(description["low"], shape, dtype),
        high=_parse_bound(description["high"], shape, dtype),
        shape=shape,
        dtype=dtype.type,
    )


def _known_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        raise DecodeError(f"unknown dtype {shown(name)}")
    return np.dtype(name)


def _describe_discrete(space: spaces.Discrete[Any]) -> dict[str, Any]:
    return {"n": int(space.n), "start": int(space.start)} | _unusual_dtype(space)


def _unusual_dtype(space: Space[Any]) -> dict[str, str]:
    """Name a dtype only if it differs from Gymnasium's default."""
    return {} if space.dtype == np.int64 else {"dtype": np.dtype(space.dtype).name}


def _parse_dtype(description: dict[str, Any]) -> type[np.integer[Any]]:
    kind = _known_dtype(description.get("dtype", "int64")).type
    if not issubclass(kind, np.integer):
        raise DecodeError(f"{description['dtype']} is not an integer dtype")
    return kind


def _parse_discrete(description: dict[str, Any]) -> Space[Any]:
    n, start = description["n"], description.get("start", 0)
    if "dtype" not in description:
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=_parse_dtype(description))


def _describe_multi_discrete(space: spaces.MultiDiscrete[Any]) -> dict[str, Any]:
    return {"nvec": space.nvec.tolist(), "start": space.start.tolist()} | _unusual_dtype(space)


def _parse_multi_discrete(description: dict[str, Any]) -> Space[Any]:
    whole = np.dtype(np.int64)
    nvec = decode_array(description["nvec"], whole, None)
    start = (
        decode_array(description["start"], whole, nvec.shape)
        if "start" in description
        else np.zeros_like(nvec)
    )
    return spaces.MultiDiscrete(nvec, start=start, dtype=_parse_dtype(description))


def _parse_multi_binary(description: dict[str, Any]) -> Space[Any]:
    n = description["n"]
    return spaces.MultiBinary(n if isinstance(n, int) else list(_parse_shape(n)))


def _describe_text(space: spaces.Text) -> dict[str, Any]:
    return {
        "min_length": space.min_length,
        "max_length": space.max_length,
        "charset": "".join(space.character_list),
    }


def _parse_text(description: dict[str, Any]) -> Space[Any]:
    return spaces.Text(
        description["max_length"], min_length=description["min_length"], charset=description["charset"]
    )


def _describe_dict(space: spaces.Dict) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in space.spaces):
        raise TypeError("the keys of a Dict space must be strings to go over the wire")
    return {"spaces": {key: describe_space(part) for key, part in space.spaces.items()}}


def _parse_dict(description: dict[str, Any]) -> Space[Any]:
    parts = OrderedDict((key, _parse(part)) for key, part in description["spaces"].items())
    # The order is the describing side's; Gymnasium sorts the keys of a plain dict.
    return spaces.Dict(parts)


def _describe_parts(space: spaces.Tuple[Any] | spaces.OneOf[Any]) -> dict[str, Any]:
    return {"spaces": [describe_space(part) for part in space.spaces]}


def _parse_parts(description: dict[str, Any]) -> list[Space[Any]]:
    parts = description["spaces"]
    if not isinstance(parts, list):
        raise DecodeError("`spaces` is a list of spaces")
    return [_parse(part) for part in parts]


def _describe_sequence(space: spaces.Sequence) -> dict[str, Any]:
    return {"space": describe_space(space.feature_space), "stack": bool(space.stack)}


def _parse_sequence(description: dict[str, Any]) -> Space[Any]:
    return spaces.Sequence(_parse(description["space"]), stack=bool(description.get("stack", False)))


def _describe_graph(space: spaces.Graph) -> dict[str, Any]:
    edge = space.edge_space
    return {
        "node_space": describe_space(space.node_space),
        "edge_space": None if edge is None else describe_space(edge),
    }


def _parse_graph(description: dict[str, Any]) -> Space[Any]:
    edge = description.get("edge_space")
    return spaces.Graph(
        node_space=_parse(description["node_space"]),
        edge_space=None if edge is None else _parse(edge),
    )


_DESCRIBERS: tuple[tuple[type[Space[Any]], Callable[[Any], dict[str, Any]]], ...] = (
    (UnicodeText, lambda space: {}),
    (spaces.Text, _describe_text),
    (spaces.Discrete, _describe_discrete),
    (spaces.Box, _describe_box),
    (spaces.MultiDiscrete, _describe_multi_discrete),
    (spaces.MultiBinary, lambda space: {"n": space.n if isinstance(space.n, int) else list(space.shape)}),
    (spaces.Dict, _describe_dict),
    (spaces.Tuple, _describe_parts),
    (spaces.OneOf, _describe_parts),
    (spaces.Sequence, _describe_sequence),
    (spaces.Graph, _describe_graph),
)

_PARSERS: dict[Any, Callable[[dict[str, Any]], Space[Any]]] = {
    "UnicodeText": lambda description: UnicodeText(),
    "Text": _parse_text,
    "Discrete": _parse_discrete,
    "Box": _parse_box,
    "MultiDiscrete": _parse_multi_discrete,
    "MultiBinary": _parse_multi_binary,
    "Dict": _parse_dict,
    "Tuple": lambda description: spaces.Tuple(_parse_parts(description)),
    "OneOf": lambda description: spaces.OneOf(_parse_parts(description)),
    "Sequence": _parse_sequence,
    "Graph": _parse_graph,
}
