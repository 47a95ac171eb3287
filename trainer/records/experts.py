"""Experts that a mixture of experts took for tokens, as few bytes as they fit in: for records and the rollout log."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.int16]
"""Experts of a sequence's first tokens, `[tokens, layers * taken]`, layer by layer; -1 where unknown."""

_TYPES: Mapping[str, np.dtype[Any]] = {"u1": np.dtype("u1"), "i2": np.dtype("<i2")}
_MOST_OF_A_TOKEN = 2**15


def to_bytes(experts: Experts) -> tuple[str, int, bytes]:
    """Return experts as the type of their numbers, how many each token has, and their bytes."""
    small = not experts.size or (int(experts.min()) >= 0 and int(experts.max()) < 256)
    kind = "u1" if small else "i2"
    return kind, experts.shape[1], np.ascontiguousarray(experts, dtype=_TYPES[kind]).tobytes()


def from_bytes(kind: object, width: object, content: object) -> Experts:
    """Read what `to_bytes` made.

    Raises:
        ValueError: If it is not that; no memory is taken beyond the bytes that are there.
    """
    if not isinstance(kind, str) or kind not in _TYPES or not isinstance(content, bytes):
        raise ValueError(f"is of none of the types {', '.join(_TYPES)}")
    if type(width) is not int or not 1 <= width <= _MOST_OF_A_TOKEN:
        raise ValueError("has no number of experts for each token")
    if len(content) % (_TYPES[kind].itemsize * width):
        raise ValueError(f"has {len(content)} bytes, which are not {width} experts for each token")
    numbers = np.frombuffer(content, dtype=_TYPES[kind]).reshape(-1, width)
    if numbers.size and int(numbers.min()) < -1:
        raise ValueError("has a number below -1, which no expert has")
    return numbers.astype(np.int16)


def as_record(experts: Experts) -> list[str | int]:
    """Return experts as plain data: the type of numbers, how many each token has, and their bytes in base64."""
    kind, width, content = to_bytes(experts)
    return [kind, width, b64encode(content).decode("ascii")]


def from_record(record: Sequence[str | int], tokens: int) -> Experts:
    """Read what `as_record` returned.

    Args:
        record: The record to read.
        tokens: Tokens of the sequence.

    Raises:
        ValueError: If it is not that, or is of more tokens than there are.
    """
    kind, width, text = record
    try:
        content = b64decode(str(text), validate=True)
    except (Base64Error, ValueError) as error:
        raise ValueError(f"is not base64: {error}") from error
    experts = from_bytes(kind, width, content)
    if len(experts) > tokens:
        raise ValueError(f"is of {len(experts)} tokens, and there are {tokens}")
    return experts


class ExpertsWriter:
    """Turns the experts of an episode's replies into fields of log entries.

    A reply's experts are those of its whole prompt, too, most of which were those of the reply before: what is equal
    to that one's beginning is not written again.
    """

    def __init__(self) -> None:
        self._last: Experts | None = None

    def fields(self, experts: Experts) -> list[object]:
        """Return what `ExpertsReader.read` reads."""
        same = 0 if self._last is None else _common(self._last, experts)
        self._last = experts
        return [same, _checksum(experts[:same]), *to_bytes(experts[same:])]


class ExpertsReader:
    """Reads the records of an `ExpertsWriter`, reply by reply; one that begins at 0 may follow at any time."""

    def __init__(self) -> None:
        self._last: Experts | None = None

    def read(self, fields: Sequence[object] | None) -> Experts | None:
        """Return a reply's experts.

        Raises:
            ValueError: If they continue experts that were never received.
        """
        if fields is None:
            return None
        same, checksum, kind, width, content = fields
        rest = from_bytes(kind, width, content)
        if same == 0:
            self._last = rest
            return rest
        known = self._last
        if (
            known is None
            or type(same) is not int
            or not 0 < same <= len(known)
            or known.shape[1] != rest.shape[1]
            or _checksum(known[:same]) != checksum
        ):
            raise ValueError("the experts that it goes on from are lost")
        self._last = np.concatenate([known[:same], rest])
        return self._last


def _common(first: Experts, second: Experts) -> int:
    """Return how many tokens at the beginning of two sequences took the same experts."""
    if first.shape[1] != second.shape[1]:
        return 0
    tokens = min(len(first), len(second))
    unequal = (first[:tokens] != second[:tokens]).any(axis=1).nonzero()[0]
    return int(unequal[0]) if len(unequal) else tokens


def _checksum(experts: Experts) -> int:
    return crc32(np.ascontiguousarray(experts, dtype="<i2").tobytes())
