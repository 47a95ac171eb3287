"""Arrays on the wire: nested lists while they are small, raw little-endian bytes beyond that."""

from __future__ import annotations

import base64
import binascii
import math
from itertools import chain
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LIST_LIMIT = 1024
"""Arrays of more elements than this go as bytes also in JSON."""

INTEGER_LIMIT = 2**53
"""Integers on the wire stay below this in magnitude, so that every JSON reader gets them exactly."""

_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
# Each access to `dtype.name` computes it again, which costs more than all the rest of encoding a small array.
DTYPES = frozenset(_DTYPES)
"""The names of the dtypes that have a form on the wire."""
_NAMES = {np.dtype(name): name for name in _DTYPES}
MAX_DIMENSIONS = 32
"""The largest number of dimensions of arrays on the wire, which all releases of NumPy support."""

_SHOWN = 40
_SMALL = 32
_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EncodeError(ValueError):
    """A value has no form on the wire, or does not have the shape that its space says."""


class DecodeError(ValueError):
    """A value from the wire does not fit its schema."""


def float_name(value: float) -> str:
    """Return the JSON string that stands for a float which JSON has no number for."""
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def encode_array(array: Array, *, binary: bool, raw: bool = False, as_lists: bool = False) -> Any:
    """Encode an array whose dtype the reader knows, or any array if `raw` selects `__nd__`.

    With `as_lists`, lists are given of an array of any size; None if its numbers need another form.

    Raises:
        EncodeError: The dtype is not boolean, integer or float of at most 64 bits.
    """
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in _DTYPES:
        raise EncodeError(f"arrays of dtype {array.dtype} have no form on the wire")
    if as_lists and _has_big_integers(array):
        return None
    if not as_lists and (binary or raw or array.size > LIST_LIMIT or _has_big_integers(array)):
        content = np.ascontiguousarray(array, dtype=_DTYPES[name]).tobytes()
        payload = content if binary else base64.b64encode(content).decode("ascii")
        return {"__nd__": [name, list(array.shape), payload]}
    plain = array.tolist()
    return _name_special(plain) if array.dtype.kind == "f" and not _all_finite(array, plain) else plain


def _all_finite(array: Array, plain: Any) -> bool:
    if array.ndim == 1 and array.size <= 32:  # cheaper without numpy
        return all(map(math.isfinite, plain))
    return bool(np.isfinite(array).all())


def _has_big_integers(array: Array) -> bool:
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or array.size == 0:
        return False
    return int(array.max()) >= INTEGER_LIMIT or int(array.min()) <= -INTEGER_LIMIT


def _name_special(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_name_special(part) for part in plain]
    return plain if math.isfinite(plain) else float_name(plain)


def decode_array(wire: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Array:
    """Decode a list, a number or `__nd__` to a fresh array of exactly this dtype (and shape, if given).

    Untrusted data is checked before anything is built from it: the check of types, depth and number of elements visits
    each part once, and stops at the first list of another shape.

    Raises:
        DecodeError: It is something else, ragged, of another shape, or a value does not fit the dtype.
    """
    array = decode_nd(wire) if isinstance(wire, dict) else _from_lists(wire, dtype, shape)
    if shape is not None and array.shape != shape:
        # A list cannot say what the inner shape of an empty array is.
        if array.size or math.prod(shape):
            raise DecodeError(f"shape is {list(array.shape)}, expected {list(shape)}")
        array = array.reshape(shape)
    return _cast(array, dtype)


def decode_nd(wire: dict[str, Any]) -> Array:
    """Decode `{"__nd__": [dtype, shape, bytes or base64]}` to a fresh, writable array.

    Raises:
        DecodeError: The object does not fit this schema, or the bytes are too many or too few.
    """
    fields = wire.get("__nd__")
    if len(wire) != 1 or not isinstance(fields, list) or len(fields) != 3:
        raise DecodeError('an array is {"__nd__": [dtype, shape, content]}')
    name, shape, content = fields
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise DecodeError(f"unknown dtype {shown(name)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"the shape of an array is a list of at most {MAX_DIMENSIONS} sizes")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise DecodeError("the shape of an array is a list of sizes")
    content = decode_bytes(content)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise DecodeError(f"{len(content)} bytes do not hold {name} of shape {shape}")
    try:
        return np.frombuffer(content, dtype=dtype).reshape(shape).astype(np.dtype(name))
    except (ValueError, OverflowError) as error:  # sizes beside a zero that no array can have, for one
        raise DecodeError(str(error)) from error


def decode_bytes(content: Any) -> bytes:
    """Return raw bytes from bytes or from base64 text.

    Raises:
        DecodeError: It is neither.
    """
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        raise DecodeError("binary content is base64 text (JSON) or bytes (MessagePack)")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"bad base64: {error}") from error


def shown(value: Any) -> str:
    """Return untrusted data for a message: cut, so that refusing a megabyte does not send it back."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | bytes | list) else value)
    except RecursionError:
        return f"a deep {type(value).__name__}"
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}..."


def _from_lists(wire: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Array:
    if type(wire) is list and len(wire) <= _SMALL and set(map(type, wire)) == {float}:
        return np.array(wire, dtype=np.float64)  # the most common action; the caller checks its shape
    sizes, elements = _flattened(wire, shape)
    return _of_elements(elements, dtype).reshape(sizes)


def _flattened(wire: Any, shape: tuple[int, ...] | None) -> tuple[list[int], list[Any]]:
    """Return the shape of nested lists and their elements; one level after the other, and each part once."""
    sizes: list[int] = []
    parts = [wire]
    while parts and type(parts[0]) is list:
        if len(sizes) == MAX_DIMENSIONS:
            raise DecodeError(f"lists are nested more than {MAX_DIMENSIONS} deep")
        if set(map(type, parts)) != {list} or len(set(map(len, parts))) != 1:
            raise DecodeError("expected numbers in nested lists of equal lengths")
        size = len(parts[0])
        # A list cannot say what the inner shape of an empty array is.
        if shape is not None and size and (len(sizes) >= len(shape) or size != shape[len(sizes)]):
            raise DecodeError(f"shape begins with {[*sizes, size]}, expected {list(shape)}")
        sizes.append(size)
        parts = list(chain.from_iterable(parts))
    return sizes, parts


def _of_elements(elements: list[Any], dtype: np.dtype[Any]) -> Array:
    """Make an array of plain numbers, in the dtype that they have themselves."""
    kinds = set(map(type, elements))
    if str in kinds and dtype.kind == "f":
        elements = [_number(each) if type(each) is str else each for each in elements]
        kinds = kinds - {str} | {float}
    if not kinds <= {int, float, bool}:
        other = next(iter(kinds - {int, float, bool}))
        raise DecodeError(f"expected numbers in nested lists, not {other.__name__}")
    if bool in kinds and len(kinds) > 1:
        raise DecodeError("a boolean is not a number")
    own = np.bool_ if bool in kinds else np.int64 if kinds == {int} else np.float64
    try:
        array: Array = np.array(elements, dtype=own)
    except OverflowError as error:
        raise DecodeError(f"not an array of numbers: {error}") from error
    if _has_big_integers(array):
        raise DecodeError("integers in lists stay below 2**53; larger ones go as __nd__")
    return array


def _number(name: str) -> float:
    if name not in _SPECIAL_FLOATS:
        raise DecodeError(f"{shown(name)} is not a number")
    return _SPECIAL_FLOATS[name]


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array
    if array.size == 0 or (dtype.kind == "f" and array.dtype.kind in "iuf"):
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    if dtype.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if int(array.min()) >= limits.min and int(array.max()) <= limits.max:
            return array.astype(dtype)
        raise DecodeError(f"a value does not fit {dtype.name}")
    # JSON writers and Gymnasium's MultiBinary use 0 and 1 for booleans and the other way round.
    if dtype.kind == "b" and array.dtype.kind in "iu" and bool(((array == 0) | (array == 1)).all()):
        return array.astype(dtype)
    raise DecodeError(f"expected {dtype.name}, got {array.dtype.name}")


OCTETS = "application/octet-stream"
"""The media type of bytes that say nothing about themselves."""


class MediaBytes(bytes):
    """Bytes that know their media type, such as an image in `info` or a rendered frame.

    Args:
        content: The bytes.
        media_type: Their media type, such as `image/png`.
    """

    media_type: str

    def __new__(cls, content: bytes | bytearray | memoryview, media_type: str = OCTETS) -> MediaBytes:
        """Make a copy of the content and label it."""
        labelled = super().__new__(cls, content)
        labelled.media_type = media_type
        return labelled

    def __reduce__(self) -> tuple[Any, ...]:
        return MediaBytes, (bytes(self), self.media_type)


def encode_media(content: bytes | bytearray | memoryview, *, binary: bool) -> dict[str, Any]:
    """Encode bytes as `{"__bytes__": [media type, content]}`."""
    media_type = content.media_type if isinstance(content, MediaBytes) else OCTETS
    plain = bytes(content)
    return {"__bytes__": [media_type, plain if binary else base64.b64encode(plain).decode("ascii")]}


def decode_media(wire: dict[str, Any]) -> bytes:
    """Decode bytes: plain `bytes` without a specific media type, `MediaBytes` otherwise.

    Raises:
        DecodeError: The object does not fit its schema.
    """
    fields = wire.get("__bytes__")
    if not isinstance(fields, list) or len(fields) != 2 or not isinstance(fields[0], str):
        raise DecodeError('bytes are {"__bytes__": [media type, content]}')
    content = decode_bytes(fields[1])
    return content if fields[0] == OCTETS else MediaBytes(content, fields[0])
