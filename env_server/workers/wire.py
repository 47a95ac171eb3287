"""Frames between an I/O process and its worker children: a short header and a pickle.

Requests come from the trusted I/O process. Replies come from code of environments, so they may contain only plain data
and NumPy arrays: reading a reply never imports a third party's module and never runs its code.
"""

import io
import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from gymnasium import Space
from gymnasium.spaces import GraphInstance

from rollgym.clients.protocol.arrays import MediaBytes
from rollgym.clients.protocol.spaces import parse_space

_HEADER = struct.Struct("<IIB")
_PROTOCOL = 5

READY = 0
"""The child has started (frame number 0)."""
RESULT = 1
"""The operation gave a result."""
RAISED = 2
"""The environment raised; the body holds the class and the message."""

# The functions that NumPy's pickles name, wherever this NumPy keeps them.
_RECONSTRUCT = np.zeros(()).__reduce__()[0]
_FROM_BUFFER = np.zeros(1).__reduce_ex__(_PROTOCOL)[0]
_SCALAR = np.float64().__reduce__()[0]
_KINDS: tuple[Any, ...] = (
    *(dict, list, tuple, set, frozenset, int, float, str, bytearray),
    *(np.dtype, np.ndarray, _RECONSTRUCT, _FROM_BUFFER, _SCALAR),
    *(GraphInstance, MediaBytes),
)
_READABLE = {(kind.__module__, kind.__name__): kind for kind in _KINDS}
_WRITABLE = frozenset(map(id, _KINDS))


class Frame(NamedTuple):
    """One frame: the number of its request, its status, and its pickled body."""

    number: int
    status: int
    body: bytes


class FrameSplitter:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes; return the frames that are complete."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, number, status = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            yield Frame(number, status, bytes(memoryview(buffer)[start + _HEADER.size : end]))
            start = end
        if start:
            del buffer[:start]


def frame(number: int, status: int, body: bytes) -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(len(body), number, status) + body


def dump_request(request: Any) -> bytes:
    """Pickle a request of an I/O process to a child."""
    return pickle.dumps(request, _PROTOCOL)


def load_request(body: bytes) -> Any:
    """Unpickle a request of an I/O process."""
    return pickle.loads(body)


def read_space(description: bytes) -> Space[Any]:
    """Return a space that a worker has described as JSON."""
    return parse_space(orjson.loads(description))


class _ResultPickler(pickle.Pickler):
    """Writes plain data; subclasses of plain types are written as their base, anything else is refused."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic | np.dtype | GraphInstance | MediaBytes):
            return NotImplemented
        if id(value) in _WRITABLE:
            return NotImplemented
        if isinstance(value, bytearray):
            return bytearray, (bytes(value),)
        for base in (int, float, str):
            if isinstance(value, base):
                return base, (base(value),)
        if isinstance(value, Mapping):
            return dict, (list(value.items()),)
        if isinstance(value, list):
            return list, (tuple(value),)
        for collection in (tuple, set, frozenset):
            if isinstance(value, collection):
                return collection, (list(value),)
        raise TypeError(f"a value of type {type(value).__name__} has no form on the wire")


def dump_result(result: Any) -> bytes:
    """Pickle an environment's result.

    Raises:
        TypeError: It holds something that has no form on the wire. Objects of the environment may raise anything.
    """
    stream = io.BytesIO()
    _ResultPickler(stream, _PROTOCOL).dump(result)
    return stream.getvalue()


class _ResultUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _READABLE[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"a reply names {module}.{name}") from None


def load_result(body: bytes) -> Any:
    """Unpickle the answer of a child, with plain data and arrays only.

    Raises:
        pickle.UnpicklingError: It is more than plain data and arrays, or cannot be put together again: a mapping
            that was a key, for one, has become a plain one.
    """
    try:
        return _ResultUnpickler(io.BytesIO(body)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise pickle.UnpicklingError(f"a reply cannot be read: {type(error).__name__}: {error}") from error
