"""What an instruction or a rule says beside its name: numbers, words, relations; read from data that others wrote."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "at most", "around"]
Reader = Callable[[Any], Any]

_LARGEST = 1_000_000
_LONGEST = 20_000


def is_reference(value: Any) -> bool:
    """Whether an answer can be compared with a value: a text, a number, a truth value; an empty cell (NaN) is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, (str, int, float)) and bool(str(value).strip())


def count(value: Any) -> int:
    """Read a number of things; tables that lost the type make `3.0` of `3`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise ValueError(f"a whole number from 0 to {_LARGEST} is needed, not {str(value)[:80]!r}")
    if value != int(value):
        raise ValueError(f"a whole number is needed, not {value!r}")
    return int(value)


def text(value: Any) -> str:
    """Read a text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"a text is needed, not {value!r}")
    if len(value) > _LONGEST:
        raise ValueError(f"a text of at most {_LONGEST} characters is needed, not {len(value)}")
    return value


def word(value: Any) -> str:
    """Read a word; some data sets give a list of one."""
    return text(value[0] if isinstance(value, list) and value else value).strip()


def texts(value: Any) -> list[str]:
    """Read a list of texts."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"a list of texts is needed, not {value!r}")
    return [text(each) for each in value]


def share(value: Any) -> float:
    """Read a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"a number from 0 to 1 is needed, not {value!r}")
    return float(value)


def flag(value: Any) -> bool:
    """Read a yes or no."""
    if not isinstance(value, bool):
        raise ValueError(f"true or false is needed, not {value!r}")
    return value


def counts(value: Any) -> dict[str, int]:
    """Read how often each of some texts is wanted."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"a mapping of texts to numbers is needed, not {value!r}")
    return {text(key): count(each) for key, each in value.items()}


def relation(value: Any) -> Relation:
    """Read how a count is compared."""
    if value == "less than":
        return "less than"
    if value == "at least":
        return "at least"
    raise ValueError(f"'less than' or 'at least' is needed, not {value!r}")


def quantifier(value: Any) -> Quantifier:
    """Read how a count is compared in RLVR-IFEval."""
    for name in ("at least", "at most", "around"):
        if value == name:
            return name
    raise ValueError(f"'at least', 'at most' or 'around' is needed, not {value!r}")


def holds(number: int, how: Relation, bound: int) -> bool:
    """Whether a number is less than a bound, or at least that."""
    return number < bound if how == "less than" else number >= bound


def read_arguments(
    name: str, given: Mapping[str, Any], readers: Mapping[str, Reader], optional: frozenset[str]
) -> dict[str, Any]:
    """Return the arguments of an instruction; what is None was never said.

    Raises:
        ValueError: One is missing, unknown, or makes no sense.
    """
    said = {key: value for key, value in given.items() if value is not None}
    for key in said:
        if key not in readers:
            raise ValueError(f"{name} has no argument {key!r}; it has {', '.join(readers) or 'none'}")
    read = {}
    for key, reader in readers.items():
        if key in said:
            try:
                read[key] = reader(said[key])
            except ValueError as error:
                raise ValueError(f"{key} of {name}: {error}") from None
        elif key not in optional:
            raise ValueError(f"{name} needs the argument {key!r}")
    return read
