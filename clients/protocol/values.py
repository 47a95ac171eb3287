"""Values on the wire: observations, actions and infos to plain data and back.

`encode_value` turns a value of a space (or, with no space, any free-form value such as an info) into data that
JSON and MessagePack can both hold; `decode_value` turns it back. Text and integers are the hot path: they cost
one dictionary look-up and a type check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import GraphInstance, Space
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from rollgym.clients.protocol.arrays import (
    INTEGER_LIMIT,
    LIST_LIMIT,
    DecodeError,
    EncodeError,
    MediaBytes,
    decode_array,
    decode_media,
    decode_nd,
    encode_array,
    encode_media,
    float_name,
)
from rollgym.clients.protocol.spaces import UnicodeText

# Deeper free-form values cannot be written as JSON by every library, together with the frame around them.
_MAX_DEPTH = 200
_TOO_DEEP = "the value is nested too deeply"

__all__ = ["DecodeError", "EncodeError", "MediaBytes", "decode_value", "encode_value"]


def encode_value(space: Space[Any] | None, value: Any, *, binary: bool) -> Any:
    """Turn a value into plain data for a frame.

    Args:
        space: The space that the value belongs to, or None for free-form values. There, arrays keep their dtype,
            tuples become lists, keys become strings, and a float that is not finite becomes its name in JSON.
            They are at most 200 levels deep.
        value: The value.
        binary: Whether the frame is MessagePack (raw bytes and IEEE floats) instead of JSON.

    Raises:
        EncodeError: The value does not have the form of the space, or has no form on the wire.
    """
    try:
        if space is None:
            return _encode_free(value, binary)
        encoder = _ENCODERS.get(type(space)) or _find(_ENCODERS, space)
        return encoder(space, value, binary)
    except RecursionError:
        raise EncodeError(_TOO_DEEP) from None


def decode_value(space: Space[Any] | None, wire: Any) -> Any:
    """Turn plain data of either encoding back into a value; nothing in the result is shared with `wire`'s arrays.

    Types and shapes are checked; whether the value lies in the space (bounds, alphabet) is `space.contains`'s
    question. Discrete values come back as `int`, other numbers as arrays of the space's dtype. Free-form values (no
    space) are at most 200 levels deep.

    Raises:
        DecodeError: The data does not fit.
    """
    try:
        if space is None:
            return _decode_free(wire)
        decoder = _DECODERS.get(type(space)) or _find(_DECODERS, space)
        return decoder(space, wire)
    except RecursionError:
        raise DecodeError(_TOO_DEEP) from None


def _find(table: Mapping[type, Callable[..., Any]], space: Space[Any]) -> Callable[..., Any]:
    """Find the codec of a subclass of one of the known space types."""
    for kind, codec in table.items():
        if isinstance(space, kind):
            return codec
    raise TypeError(f"a space of type {type(space).__name__} has no form on the wire")


# -- free-form values ------------------------------------------------------------------------------------------


def _encode_free(value: Any, binary: bool, depth: int = 0) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _checked_text(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return _checked_integer(value)
    if kind is float:
        return value if binary or math.isfinite(value) else float_name(value)
    depth += 1
    if depth > _MAX_DEPTH:
        raise EncodeError(_TOO_DEEP)
    if kind is list or kind is tuple:
        return [_encode_free(part, binary, depth) for part in value]
    if kind is dict or isinstance(value, Mapping):
        encoded = {_key(key): _encode_free(part, binary, depth) for key, part in value.items()}
        if len(encoded) != len(value):
            raise EncodeError("two keys of a mapping are the same text")
        return encoded
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [_encode_free(part, binary, depth) for part in parts]
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return encode_array(value, binary=binary, raw=True)
        return _encode_free(value.tolist(), binary, depth)
    return _encode_rare(value, binary, depth)


def _encode_rare(value: Any, binary: bool, depth: int) -> Any:
    if isinstance(value, np.generic):
        return _encode_free(value.item(), binary, depth)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return encode_media(value, binary=binary)
    # Subclasses (enumerations of integers or strings, for one) travel as their plain base.
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return _encode_free(base(value), binary, depth)
    raise EncodeError(f"a value of type {type(value).__name__} has no form on the wire")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key if key.isascii() else _checked_text(key)
    if isinstance(key, (int, np.integer)):
        return str(key)
    raise EncodeError(f"a key of type {type(key).__name__} has no form on the wire")


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"text with a lone surrogate is not Unicode: {error.reason}") from error
    return str(text)


def _checked_integer(value: int) -> int:
    if -INTEGER_LIMIT < value < INTEGER_LIMIT:
        return value
    raise EncodeError(f"the integer {value} is not below 2**53")


def _decode_free(wire: Any, depth: int = 0) -> Any:
    kind = type(wire)
    if wire is None or kind in (str, float, bool):
        return wire
    if kind is int:
        if -INTEGER_LIMIT < wire < INTEGER_LIMIT:
            return wire
        raise DecodeError(f"the integer {wire} is not below 2**53")
    depth += 1
    if depth > _MAX_DEPTH:
        raise DecodeError(_TOO_DEEP)
    if kind is dict:
        if len(wire) == 1:
            if "__nd__" in wire:
                return decode_nd(wire)
            if "__bytes__" in wire:
                return decode_media(wire)
        for key in wire:
            # MessagePack has bytes for names, which JSON and schemas do not.
            if not isinstance(key, str):
                raise DecodeError(f"a name is text, not {type(key).__name__}")
        return {key: _decode_free(part, depth) for key, part in wire.items()}
    if kind is list:
        return [_decode_free(part, depth) for part in wire]
    raise DecodeError(f"unexpected {kind.__name__}")


# -- text and integers -----------------------------------------------------------------------------------------


def _encode_text(space: Space[str], value: Any, binary: bool) -> str:
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, str):
        raise EncodeError(f"expected text, got {type(value).__name__}")
    return _checked_text(value)


def _decode_text(space: Space[str], wire: Any) -> str:
    if type(wire) is not str:
        raise DecodeError(f"expected text, got {type(wire).__name__}")
    return wire


def _encode_discrete(space: spaces.Discrete[Any], value: Any, binary: bool) -> int:
    if type(value) is int:
        return _checked_integer(value)
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        return _checked_integer(int(value))
    if isinstance(value, (int, np.integer, np.bool_)):
        return _checked_integer(int(value))
    raise EncodeError(f"expected an integer, got {type(value).__name__}")


def _decode_discrete(space: spaces.Discrete[Any], wire: Any) -> int:
    if type(wire) is not int:
        raise DecodeError(f"expected an integer, got {type(wire).__name__}")
    return wire


# -- arrays ----------------------------------------------------------------------------------------------------

_Arrays: TypeAlias = "spaces.Box | spaces.MultiDiscrete[Any] | spaces.MultiBinary"


def _as_array(value: Any, dtype: Any, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
        if array.dtype != dtype:
            array = _cast(array, np.dtype(dtype))
    except (ValueError, TypeError, OverflowError) as error:
        raise EncodeError(f"not an array of {np.dtype(dtype).name}: {error}") from error
    if shape is not None and array.shape != shape:
        raise EncodeError(f"shape is {list(array.shape)}, expected {list(shape)}")
    return array


def _cast(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the same numbers in another type; an integer type accepts whole numbers only.

    Cut to integers, a picture of fractions would turn black.

    Raises:
        EncodeError: If the type is an integer type, and the numbers are not whole or not in its range.
        ValueError: If they are not numbers at all.
    """
    with np.errstate(invalid="ignore"):
        cast = np.asarray(array, dtype=dtype)
    if dtype.kind in "iu" and array.dtype.kind in "iuf" and not np.array_equal(cast, array):
        raise EncodeError(f"not an array of {dtype.name}: its {array.dtype.name} numbers do not fit")
    return cast


def _encode_box(space: _Arrays, value: Any, binary: bool) -> Any:
    array = _as_array(value, space.dtype, space.shape)
    return encode_array(array, binary=binary and isinstance(space, spaces.Box))


def _decode_box(space: _Arrays, wire: Any) -> np.ndarray[Any, Any]:
    return decode_array(wire, np.dtype(space.dtype), space.shape)


# -- compounds -------------------------------------------------------------------------------------------------


def _encode_dict(space: spaces.Dict, value: Any, binary: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
        raise EncodeError(f"expected a mapping with the keys {list(space.spaces)}")
    return {key: encode_value(part, value[key], binary=binary) for key, part in space.spaces.items()}


def _decode_dict(space: spaces.Dict, wire: Any) -> dict[str, Any]:
    if type(wire) is not dict or wire.keys() != space.spaces.keys():
        raise DecodeError(f"expected an object with the keys {list(space.spaces)}")
    return {key: decode_value(part, wire[key]) for key, part in space.spaces.items()}


def _encode_tuple(space: spaces.Tuple[Any], value: Any, binary: bool) -> list[Any]:
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != len(space.spaces):
        raise EncodeError(f"expected a tuple of {len(space.spaces)} parts")
    parts = zip(space.spaces, value, strict=True)
    return [encode_value(part, item, binary=binary) for part, item in parts]


def _decode_tuple(space: spaces.Tuple[Any], wire: Any) -> tuple[Any, ...]:
    if type(wire) is not list or len(wire) != len(space.spaces):
        raise DecodeError(f"expected a list of {len(space.spaces)} parts")
    return tuple(decode_value(part, item) for part, item in zip(space.spaces, wire, strict=True))


def _encode_one_of(space: spaces.OneOf[Any], value: Any, binary: bool) -> list[Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not 0 <= value[0] < len(space.spaces):
        raise EncodeError("expected a pair: which of the spaces, and a value of it")
    return [int(value[0]), encode_value(space.spaces[int(value[0])], value[1], binary=binary)]


def _decode_one_of(space: spaces.OneOf[Any], wire: Any) -> tuple[Any, Any]:
    if type(wire) is not list or len(wire) != 2 or type(wire[0]) is not int:
        raise DecodeError("expected a pair: which of the spaces, and a value of it")
    if not 0 <= wire[0] < len(space.spaces):
        raise DecodeError(f"there is no space number {wire[0]}")
    # Gymnasium's own samples carry the index as np.int64, and `contains` insists on that type.
    return np.int64(wire[0]), decode_value(space.spaces[wire[0]], wire[1])


def _encode_sequence(space: spaces.Sequence, value: Any, binary: bool) -> list[Any]:
    items = iterate(space.stacked_feature_space, value) if space.stack else value
    if not space.stack and not isinstance(value, (tuple, list)):
        raise EncodeError(f"expected a tuple, got {type(value).__name__}")
    if not binary and not space.stack and (rows := stacked_rows(space.feature_space, value)) is not None:
        plain = encode_array(rows, binary=False, as_lists=True)
        if plain is not None:
            return plain  # type: ignore[no-any-return]
    return [encode_value(space.feature_space, item, binary=binary) for item in items]


def _decode_sequence(space: spaces.Sequence, wire: Any) -> Any:
    if type(wire) is not list:
        raise DecodeError(f"expected a list, got {type(wire).__name__}")
    feature = space.feature_space
    if wire and _has_rows(feature) and set(map(type, wire)) == {list}:
        rows = decode_array(wire, np.dtype(feature.dtype), (len(wire), *(feature.shape or ())))
        return rows if space.stack else tuple(rows)
    items = tuple(decode_value(feature, item) for item in wire)
    if not space.stack:
        return items
    empty: Any = create_empty_array(space.feature_space, len(items))
    return concatenate(space.feature_space, items, empty) if items else empty


def _has_rows(feature: Space[Any]) -> bool:
    """Whether values of a space are arrays that many of can be looked at as one."""
    return (
        type(feature) in (spaces.Box, spaces.MultiDiscrete)
        and feature.dtype is not None
        and feature.dtype.kind in "iuf"
        and 0 < math.prod(feature.shape or ()) <= LIST_LIMIT
        and bool(feature.shape)
    )


def stacked_rows(feature: Space[Any], items: Any) -> np.ndarray[Any, Any] | None:
    """Return the items of a sequence as one array; None if they cannot be combined."""
    if not items or not _has_rows(feature) or set(map(type, items)) != {np.ndarray}:
        return None
    if {item.dtype for item in items} != {feature.dtype} or {item.shape for item in items} != {feature.shape}:
        return None
    return np.stack(items)


def _encode_features(space: Any, value: Any, binary: bool) -> Any:
    shape = (len(value), *space.shape)
    return encode_array(_as_array(value, space.dtype, shape), binary=binary)


def _decode_features(space: Any, wire: Any) -> np.ndarray[Any, Any]:
    count = wire["__nd__"][1][0] if isinstance(wire, dict) and _is_nd_row(wire) else None
    if count is None:
        if type(wire) is not list:
            raise DecodeError("expected a list of features")
        count = len(wire)
    return decode_array(wire, np.dtype(space.dtype), (count, *space.shape))


def _is_nd_row(wire: dict[str, Any]) -> bool:
    fields = wire.get("__nd__")
    return isinstance(fields, list) and len(fields) == 3 and isinstance(fields[1], list) and bool(fields[1])


_EDGE_LINKS = spaces.Box(low=0, high=np.iinfo(np.int32).max, shape=(2,), dtype=np.int32)


def _encode_graph(space: spaces.Graph, value: Any, binary: bool) -> dict[str, Any]:
    if not isinstance(value, GraphInstance):
        raise EncodeError(f"expected a GraphInstance, got {type(value).__name__}")
    edges, links = value.edges, value.edge_links
    return {
        "nodes": _encode_features(space.node_space, value.nodes, binary),
        "edges": None if edges is None else _encode_features(space.edge_space, edges, binary),
        "edge_links": None if links is None else _encode_features(_EDGE_LINKS, links, binary),
    }


def _decode_graph(space: spaces.Graph, wire: Any) -> GraphInstance:
    if type(wire) is not dict or wire.keys() != {"nodes", "edges", "edge_links"}:
        raise DecodeError("a graph is an object with nodes, edges and edge_links")
    edges, links = wire["edges"], wire["edge_links"]
    if edges is not None and space.edge_space is None:
        raise DecodeError("this graph space has no edge features")
    return GraphInstance(
        nodes=_decode_features(space.node_space, wire["nodes"]),
        edges=None if edges is None else _decode_features(space.edge_space, edges),
        edge_links=None if links is None else _decode_features(_EDGE_LINKS, links),
    )


_ENCODERS: dict[type, Callable[[Any, Any, bool], Any]] = {
    UnicodeText: _encode_text,
    spaces.Text: _encode_text,
    spaces.Discrete: _encode_discrete,
    spaces.Box: _encode_box,
    spaces.MultiDiscrete: _encode_box,
    spaces.MultiBinary: _encode_box,
    spaces.Dict: _encode_dict,
    spaces.Tuple: _encode_tuple,
    spaces.OneOf: _encode_one_of,
    spaces.Sequence: _encode_sequence,
    spaces.Graph: _encode_graph,
}

_DECODERS: dict[type, Callable[[Any, Any], Any]] = {
    UnicodeText: _decode_text,
    spaces.Text: _decode_text,
    spaces.Discrete: _decode_discrete,
    spaces.Box: _decode_box,
    spaces.MultiDiscrete: _decode_box,
    spaces.MultiBinary: _decode_box,
    spaces.Dict: _decode_dict,
    spaces.Tuple: _decode_tuple,
    spaces.OneOf: _decode_one_of,
    spaces.Sequence: _decode_sequence,
    spaces.Graph: _decode_graph,
}
