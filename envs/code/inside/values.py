"""Values as JSON text: what a program may be given, and what it may answer.

Plain values only, under bounds. The reader builds new ones, so nothing of the writer's classes comes along.
"""

import datetime
import decimal
import fractions
import json
import math
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 100
MAX_NODES = 500_000
MAX_CHARACTERS = 4 * 1024 * 1024
_PLAIN_INTEGER = 1 << 53
_MAX_INTEGER_BITS = 1 << 22
_MAX_ITERATED = 10_000
_MAX_DIGITS = 10_000
# Members whose hashes are the same cost their number squared, and hashes of numbers can be chosen.
_MOST_ALIKE = 300
_MOST_HASHED = 20_000


class ValueRefusedError(ValueError):
    """A value is not plain, or too large."""


class TooLargeError(ValueRefusedError):
    """A value is too large or too deep."""


class Remote:
    """Stands for an object that stays in the process that made it."""

    def __init__(self, number: int, kind: str) -> None:
        # Names that hardly any object has, since those of the object show through.
        object.__setattr__(self, "_remote_number", number)
        object.__setattr__(self, "_remote_kind", kind)

    @staticmethod
    def number_of(remote: "Remote") -> int:
        """Return its number."""
        number: int = object.__getattribute__(remote, "_remote_number")
        return number

    @staticmethod
    def kind_of(remote: "Remote") -> str:
        """Return the name of its class."""
        kind: str = object.__getattribute__(remote, "_remote_kind")
        return kind


def dump(value: Any, keep: Callable[[Any], Remote] | None = None) -> str:
    """Return a value as one line of text.

    Args:
        value: What to write.
        keep: Asked for a stand-in for an object that is not a plain value; without it, such objects are refused.

    Raises:
        ValueRefusedError: The value is none that can be sent.
    """
    text = json.dumps(_Writer(keep).written(value, 0), ensure_ascii=True, check_circular=False)
    if len(text) > MAX_CHARACTERS:
        raise TooLargeError(f"the value is longer than {MAX_CHARACTERS} characters")
    return text


def plain(value: Any, keep: Callable[[Any], Remote] | None = None) -> Any:
    """Return a value as what `json` can write; `build` undoes it.

    Raises:
        ValueRefusedError: The value is none that can be sent.
    """
    return _Writer(keep).written(value, 0)


def build(data: Any, find: Callable[[Remote], Any] | None = None) -> Any:
    """Return the value that `plain` has written, trusted or not.

    Args:
        data: What `json` has read.
        find: Gives what a stand-in stands for; without it, stand-ins are refused.

    Raises:
        ValueRefusedError: It is not of that form, too deep or too large.
    """
    return _Reader(find).read(data, 0)


def read_json(text: str | bytes) -> Any:
    """Return what a line of JSON says.

    Raises:
        ValueRefusedError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueRefusedError(f"no JSON: {str(error)[:100]}") from None


class _Writer:
    def __init__(self, keep: Callable[[Any], Remote] | None) -> None:
        self._keep = keep
        self._left = MAX_NODES

    def written(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH:
            raise TooLargeError(f"the value is nested deeper than {MAX_DEPTH}")
        if self._left < 0:
            raise TooLargeError(f"the value has more than {MAX_NODES} parts")
        kind = type(value)
        if value is None or kind is bool:
            return value
        # Subclasses are written as what they are at the bottom: their own methods say nothing about the value.
        if issubclass(kind, bool | int):
            return _integer(int.__index__(value))
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, str):
            return str.__str__(value) if kind is str else str.__getitem__(value, slice(None))
        if issubclass(kind, list):
            return [self.written(each, depth + 1) for each in list.__iter__(value)]
        for name, base in _SEQUENCES.items():
            if issubclass(kind, base):
                return {name: [self.written(each, depth + 1) for each in base.__iter__(value)]}
        if issubclass(kind, dict):
            pairs = dict.items(value)
            return {
                "dict": [[self.written(key, depth + 1), self.written(each, depth + 1)] for key, each in pairs]
            }
        return self._rare(value, kind, depth)

    def _rare(self, value: Any, kind: type, depth: int) -> Any:
        for tag, (base, write, _) in _ATOMS.items():
            if kind is base:
                return {tag: write(value)}
        if issubclass(kind, Remote):
            return {"object": [Remote.number_of(value), Remote.kind_of(value)]}
        name = getattr(value, "__name__", None) if kind in (type, types.BuiltinFunctionType) else None
        if name is not None and _BUILTINS.get(name) is value:
            return {"builtin": name}
        if kind in _VIEWS:
            return [self.written(each, depth + 1) for each in value]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.written(value.tolist(), depth + 1)
        if isinstance(value, Iterator):
            parts = [
                self.written(each, depth + 1) for _, each in zip(range(_MAX_ITERATED), value, strict=False)
            ]
            return {"iterator": parts}
        if self._keep is None:
            raise ValueRefusedError(f"a {kind.__name__} is no plain value")
        kept = self._keep(value)
        return {"object": [Remote.number_of(kept), Remote.kind_of(kept)]}


class _Reader:
    def __init__(self, find: Callable[[Remote], Any] | None) -> None:
        self._find = find
        self._left = MAX_NODES

    def read(self, data: Any, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH:
            raise TooLargeError(f"the value is nested deeper than {MAX_DEPTH}")
        if self._left < 0:
            raise TooLargeError(f"the value has more than {MAX_NODES} parts")
        if data is None or type(data) in (bool, int, float, str):
            return data
        if type(data) is list:
            return [self.read(each, depth + 1) for each in data]
        if type(data) is not dict or len(data) != 1:
            raise ValueRefusedError("the value is of no known form")
        ((name, body),) = data.items()
        try:
            return self._tagged(name, body, depth)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            if isinstance(error, ValueRefusedError):
                raise
            raise ValueRefusedError(f"no {name}: {str(error)[:100]}") from None

    def _tagged(self, name: str, body: Any, depth: int) -> Any:
        if name in _SEQUENCES:
            parts = _listed(body)
            members = [self.read(each, depth + 1) for each in parts]
            if name in ("set", "frozenset"):
                _see_that_it_can_be_hashed(members)
            return _SEQUENCES[name](members)
        if name == "dict":
            pairs = [_listed(pair) for pair in _listed(body)]
            read = [(self.read(key, depth + 1), self.read(each, depth + 1)) for key, each in pairs]
            _see_that_it_can_be_hashed([key for key, _ in read])
            return dict(read)
        if name == "builtin":
            return _BUILTINS[_text(body)]
        if name == "iterator":
            return iter([self.read(each, depth + 1) for each in _listed(body)])
        if name in _ATOMS:
            return _ATOMS[name][2](body)
        if name == "object" and self._find is not None:
            number, kind = _listed(body)
            if type(number) is int and type(kind) is str:
                return self._find(Remote(number, kind))
        raise ValueRefusedError(f"there are no values of the form {name[:20]!r} here")


def _integer(value: int) -> Any:
    if -_PLAIN_INTEGER < value < _PLAIN_INTEGER:
        return value
    if value.bit_length() > _MAX_INTEGER_BITS:
        raise TooLargeError(f"the number has more than {_MAX_INTEGER_BITS} bits")
    # Hexadecimal is read in linear time, and Python bounds no number of its digits.
    return {"integer": hex(value)}


def _read_integer(body: Any) -> int:
    if len(_text(body)) > _MAX_INTEGER_BITS // 4 + 3:
        raise TooLargeError(f"the number has more than {_MAX_INTEGER_BITS} bits")
    return int(body, 16)


def _read_decimal(body: Any) -> decimal.Decimal:
    if len(_text(body)) > _MAX_DIGITS:
        raise TooLargeError(f"the number has more than {_MAX_DIGITS} digits")
    return decimal.Decimal(body)


def _listed(body: Any) -> list[Any]:
    if type(body) is not list:
        raise ValueRefusedError("a list is needed")
    return body


def _see_that_it_can_be_hashed(members: list[Any]) -> None:
    if len(members) > _MOST_HASHED:
        raise TooLargeError(f"a set or dictionary has more than {_MOST_HASHED} members")
    if len(members) > _MOST_ALIKE and max(Counter(map(hash, members)).values()) > _MOST_ALIKE:
        raise TooLargeError(f"a set or dictionary has more than {_MOST_ALIKE} members of one hash")


def _text(body: Any) -> str:
    if type(body) is not str:
        raise ValueRefusedError("text is needed")
    return body


def _read_fraction(body: Any) -> fractions.Fraction:
    if len(_text(body)) > _MAX_DIGITS:
        raise TooLargeError(f"the number has more than {_MAX_DIGITS} digits")
    return fractions.Fraction(*(int(part, 16) for part in body.split("/")))


def _numbers(body: Any, count: int, kind: type) -> list[Any]:
    parts = _listed(body)
    if len(parts) != count or any(type(part) is not kind for part in parts):
        raise ValueRefusedError(f"{count} numbers are needed")
    return parts


def _seconds(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _complex(value: complex) -> list[float]:
    return [value.real, value.imag]


_BUILTINS: Mapping[str, Any] = {
    each.__name__: each
    for each in (
        *(bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None), object),
        *(abs, all, any, len, max, min, sum, sorted, repr, ord, chr),
    )
}
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_ATOMS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "integer": (int, hex, _read_integer),
    "bytes": (bytes, bytes.hex, lambda body: bytes.fromhex(_text(body))),
    "bytearray": (bytearray, bytearray.hex, lambda body: bytearray.fromhex(_text(body))),
    "complex": (complex, _complex, lambda body: complex(*_numbers(body, 2, float))),
    "range": (
        range,
        lambda value: [value.start, value.stop, value.step],
        lambda body: range(*_numbers(body, 3, int)),
    ),
    "decimal": (decimal.Decimal, str, _read_decimal),
    "fraction": (
        fractions.Fraction,
        lambda value: f"{value.numerator:x}/{value.denominator:x}",
        _read_fraction,
    ),
    "date": (datetime.date, datetime.date.isoformat, lambda body: datetime.date.fromisoformat(_text(body))),
    "time": (datetime.time, datetime.time.isoformat, lambda body: datetime.time.fromisoformat(_text(body))),
    "datetime": (
        datetime.datetime,
        datetime.datetime.isoformat,
        lambda body: datetime.datetime.fromisoformat(_text(body)),
    ),
    "timedelta": (datetime.timedelta, _seconds, lambda body: datetime.timedelta(*_numbers(body, 3, int))),
    "ellipsis": (type(...), lambda value: None, lambda body: ...),
}


def holds_nan(data: Any) -> bool:
    """Tell whether what `plain` has written is or holds, at any depth, a number that is not one.

    The written form is looked at, since an iterator that was built from it can be gone through only once.
    """
    waiting = [data]
    while waiting:
        each = waiting.pop()
        if isinstance(each, float) and math.isnan(each):
            return True
        if isinstance(each, dict):
            number = each.get("decimal")
            if isinstance(number, str) and "nan" in number.lower():
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False
