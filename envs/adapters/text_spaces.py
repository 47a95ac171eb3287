"""Gymnasium's spaces in text: observations written so that they can be read, actions read from replies."""

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.values import DecodeError, decode_value
from rollgym.envs.core.profiles import bare_word

_MOST_SHOWN = 2_000
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_REMEDY = (
    "show the environment's own text rendering instead (show='render'), or wrap it so that it observes less"
)


class ObservationText:
    """Writes the observations of one space.

    Args:
        space: The observation space.
        names: Names of the parts of an observation: the numbers of a vector, the elements of a tuple, the
            values of a `Discrete`. A `Dict` has names of its own.
        precision: Significant digits of numbers that are not whole.

    Raises:
        ValueError: If the space has no text form, or the names do not fit it.
    """

    def __init__(self, space: Space[Any], names: Sequence[str] | None = None, precision: int = 4) -> None:
        if not 1 <= precision <= 17:
            raise ValueError(f"precision must be between 1 and 17, not {precision}")
        _check(space)
        parts = _part_count(space)
        if names is not None and parts is None:
            raise ValueError(f"observation_names are for vectors, tuples and Discrete, not for {space}")
        if names is not None and len(names) != parts:
            raise ValueError(f"{space} has {parts} parts, but there are {len(names)} observation_names")
        self._space = space
        self._names = None if names is None else tuple(str(name) for name in names)
        self._precision = precision

    def write(self, observation: Any) -> str:
        """Return an observation as text."""
        if self._names is None:
            return self._text(self._space, observation)
        if isinstance(self._space, spaces.Discrete):
            return self._names[int(observation) - int(self._space.start)]
        if isinstance(self._space, spaces.Tuple):
            texts = [self._text(*pair) for pair in zip(self._space.spaces, observation, strict=True)]
        else:
            texts = [self._number(number) for number in np.asarray(observation).tolist()]
        return "\n".join(_field(*pair) for pair in zip(self._names, texts, strict=True))

    def _text(self, space: Space[Any], value: Any) -> str:
        if isinstance(space, spaces.Text | UnicodeText):
            return str(value)
        if isinstance(space, spaces.Discrete):
            return str(int(value))
        if isinstance(space, spaces.Dict):
            return "\n".join(_field(name, self._text(part, value[name])) for name, part in space.items())
        if isinstance(space, spaces.Tuple):
            pairs = enumerate(zip(space.spaces, value, strict=True), 1)
            return "\n".join(_field(str(number), self._text(*pair)) for number, pair in pairs)
        if isinstance(space, spaces.Sequence):
            return self._sequence(space, value)
        return self._array(np.asarray(value))

    def _sequence(self, space: spaces.Sequence, value: Any) -> str:
        elements = iterate(space.stacked_feature_space, value) if space.stack else value
        texts = [self._text(space.feature_space, element) for element in elements]
        if not texts:
            return "nothing"
        return "\n".join(_field(str(number), text) for number, text in enumerate(texts, 1))

    def _array(self, array: NDArray[Any]) -> str:
        if array.ndim == 0:
            return self._number(array.item())
        if array.ndim == 1:
            return f"[{', '.join(self._number(number) for number in array.tolist())}]"
        return "\n".join(self._array(row) for row in array) + ("\n" if array.ndim > 2 else "")

    def _number(self, number: Any) -> str:
        if isinstance(number, float):
            text = f"{number:.{self._precision}g}"
            # What rounds to zero has no sign worth reading.
            return "0" if text == "-0" else text
        return str(int(number))


def plain_drawing(drawing: str) -> str:
    """Return an `ansi` rendering without its terminal codes.

    Cells on a coloured ground become `[x]` and coloured ones `(x)`: often only the colour shows the player's place.
    """
    parts: list[str] = []
    opened = ""
    at = 0
    for code in _COLOUR.finditer(drawing):
        parts.append(drawing[at : code.start()])
        at = code.end()
        if opened:
            parts.append(opened)
            opened = ""
        numbers = {int(number) for number in code.group(1).split(";") if number}
        if any(40 <= number <= 47 or 100 <= number <= 107 or number == 7 for number in numbers):
            parts.append("[")
            opened = "]"
        elif any(30 <= number <= 37 or 90 <= number <= 97 for number in numbers):
            parts.append("(")
            opened = ")"
    parts += [drawing[at:], opened]
    lines = "".join(parts).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _field(name: str, text: str) -> str:
    if "\n" not in text:
        return f"{name}: {text}"
    indented = text.rstrip("\n").replace("\n", "\n  ")
    return f"{name}:\n  {indented}"


def _part_count(space: Space[Any]) -> int | None:
    """Return how many parts of a space can have names; None if it has no parts to name."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Tuple):
        return len(space.spaces)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return int(space.shape[0]) if len(space.shape) == 1 else None
    return None


def _check(space: Space[Any]) -> None:
    """Refuse what has no text form that a person would read."""
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            _check(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            _check(part)
    elif isinstance(space, spaces.Sequence):
        _check(space.feature_space)
    elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        count = int(np.prod(space.shape))
        if count > _MOST_SHOWN:
            raise ValueError(
                f"observations of {count} numbers (shape {space.shape}) are no text to read: {_REMEDY}"
            )
    elif not isinstance(space, spaces.Discrete | spaces.Text | UnicodeText):
        raise ValueError(f"observations in {space} have no text form: {_REMEDY}")


Inside = Literal["exact", "contains"]

_NUMBER = re.compile(r"[-+]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_WHOLE = re.compile(r"[-+]?\d{1,18}", re.ASCII)
_SEPARATORS = re.compile(r"[\s,;]+")
_MOST_LISTED = 256
_MOST_NUMBERS = 64
_LONGEST_NUMBER = 40


class ActionText(ABC):
    """Reads the actions of one space.

    Attributes:
        names: The actions' names if they are listed, else empty.
        description: Description of the actions, for the policy.
        example: One of them.
    """

    names: tuple[str, ...] = ()
    description: str
    example: str

    @abstractmethod
    def read(self, text: str, inside: Inside) -> Any | None:
        """Return the action that a text names; None if it names none.

        Args:
            text: The text in the place of an action.
            inside: Whether the text must be the action, or only contain it.
        """


def action_text(space: Space[Any], actions: Sequence[str] | Mapping[str, Any] | None) -> ActionText:
    """Choose how the actions of a space are read.

    Args:
        space: The action space.
        actions: Names of a `Discrete`'s actions in their order, or actions of any space by name; None for numbers.

    Raises:
        ValueError: If the space needs names, or the names do not fit it.
    """
    if actions is not None:
        return NamedActions(space, actions)
    if isinstance(space, spaces.Discrete):
        if space.n > _MOST_LISTED:
            return VectorActions(np.asarray(space.start), np.asarray(space.start + space.n - 1), space)
        start = int(space.start)
        return NamedActions(space, {str(number): number for number in range(start, start + int(space.n))})
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return VectorActions(np.asarray(space.start), space.start + space.nvec - 1, space)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return VectorActions(np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8), space)
    if isinstance(space, spaces.Box) and len(space.shape) <= 1:
        return VectorActions(space.low, space.high, space)
    raise ValueError(
        f"actions in {space} cannot be said as a few numbers: name those that the policy may take, "
        "with actions={name: action}"
    )


class NamedActions(ActionText):
    """Actions that have names. A `Discrete`'s numbers are understood too, unless some name is a number."""

    def __init__(self, space: Space[Any], actions: Sequence[str] | Mapping[str, Any]) -> None:
        self._values = _values_by_name(space, actions)
        self.names = tuple(self._values)
        self.description = ", ".join(self.names)
        self.example = self.names[0]
        self._by_word = {name.lower(): value for name, value in self._values.items()}
        if len(self._by_word) != len(self._values):
            raise ValueError("actions have names that differ in more than upper and lower case")
        self._numbers = all(_WHOLE.fullmatch(name) for name in self.names)
        if isinstance(space, spaces.Discrete) and not any(_WHOLE.fullmatch(name) for name in self.names):
            self._by_word |= {str(value): value for value in self._values.values()}
        # A name within another, as "up" in "jump up", must not win over it.
        self._longest_first = sorted(self.names, key=len, reverse=True)

    def read(self, text: str, inside: Inside) -> Any | None:
        """Return the action of the name that a text is, or contains."""
        word = bare_word(text)
        found = self._by_word.get(word)
        if found is None and inside == "contains":
            found = self._contained(word)
        return copy.deepcopy(found)

    def _contained(self, word: str) -> Any | None:
        if self._numbers:
            return next((self._by_word[part] for part in _WHOLE.findall(word) if part in self._by_word), None)
        return next((self._values[name] for name in self._longest_first if name.lower() in word), None)


class VectorActions(ActionText):
    """Actions that are one number or a few, such as `0.5, -1` or `[2 0 1]`."""

    def __init__(self, low: NDArray[Any], high: NDArray[Any], space: Space[Any]) -> None:
        if low.size > _MOST_NUMBERS:
            raise ValueError(
                f"an action of {low.size} numbers is too long to say: name those that the policy may take, "
                "with actions={name: action}"
            )
        self._space = space
        self._shape = low.shape
        self._whole = not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind in "iub"
        self._low, self._high = low.reshape(-1).tolist(), high.reshape(-1).tolist()
        zero = [min(max(0, below), above) for below, above in zip(self._low, self._high, strict=True)]
        self.example = ", ".join(f"{number:.6g}" for number in zero)
        self.description = self._describe()

    def read(self, text: str, inside: Inside) -> Any | None:
        """Return the action whose numbers a text is, or contains."""
        numbers = self._numbers(text, inside)
        if numbers is None or len(numbers) != len(self._low):
            return None
        if self._whole:
            bounds = zip(numbers, self._low, self._high, strict=True)
            if not all(below <= number <= above for number, below, above in bounds):
                return None
        if isinstance(self._space, spaces.Discrete):
            return int(numbers[0])
        with np.errstate(over="ignore"):
            action = np.asarray(numbers, dtype=self._space.dtype).reshape(self._shape)
        # The space itself compares what the number is at its precision; an unbounded one would take infinity.
        return action if bool(np.isfinite(action).all()) and self._space.contains(action) else None

    def _numbers(self, text: str, inside: Inside) -> list[float] | None:
        if len(text) > _LONGEST_NUMBER * (len(self._low) + 1):
            return None
        plain = text.replace("−", "-")
        if inside == "contains":
            return [self._number(part) for part in _NUMBER.findall(plain)]
        plain = plain.strip("\"'`“”‘’ \t\r\n").removesuffix(".")
        if plain[:1] in ("[", "(") and plain[-1:] in ("]", ")"):
            plain = plain[1:-1].strip()
        parts = _SEPARATORS.split(plain)
        return [self._number(part) for part in parts] if all(map(_NUMBER.fullmatch, parts)) else None

    def _number(self, text: str) -> float:
        if self._whole:
            # A whole number keeps all its digits; any other text lies outside all bounds.
            return int(text) if _WHOLE.fullmatch(text) else math.nan
        return float(text)

    def _describe(self) -> str:
        kind = "whole number" if self._whole else "number"
        ranges = [_range(below, above) for below, above in zip(self._low, self._high, strict=True)]
        if len(ranges) == 1:
            return f"one {kind}{ranges[0] and ' ' + ranges[0]}"
        start = f"{len(ranges)} {kind}s, separated by commas"
        if len(set(ranges)) == 1:
            return f"{start}{ranges[0] and ', each ' + ranges[0]}"
        return f"{start}: {'; '.join(text or 'any' for text in ranges)}"


def _range(below: float, above: float) -> str:
    if math.isinf(below) and math.isinf(above):
        return ""
    if math.isinf(above):
        return f"of at least {below:.6g}"
    return f"of at most {above:.6g}" if math.isinf(below) else f"from {below:.6g} to {above:.6g}"


def _values_by_name(space: Space[Any], actions: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return checked actions by name."""
    if isinstance(actions, str) or not actions:
        raise ValueError(f"actions must be a list of names, or actions by name, not {actions!r}")
    if not isinstance(actions, Mapping):
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"a list of names fits Discrete only; for {space} give actions={{name: action}}")
        if len(actions) != space.n:
            raise ValueError(f"{space} has {space.n} actions, but {len(actions)} are named")
        if len(set(actions)) != len(actions):
            raise ValueError("two actions have the same name")
        actions = {name: int(space.start) + number for number, name in enumerate(actions)}
    values: dict[str, Any] = {}
    for name, plain in actions.items():
        if not isinstance(name, str) or bare_word(name) != name.lower() or not name:
            raise ValueError(
                f"{name!r} cannot be the name of an action: quotes and blanks around it are not read"
            )
        try:
            value = decode_value(space, plain.tolist() if isinstance(plain, np.ndarray) else plain)
        except DecodeError as error:
            raise ValueError(f"action {name!r} is not in {space}: {error}") from error
        if not space.contains(value):
            raise ValueError(f"action {name!r} is not in {space}: {plain!r}")
        values[name] = value
    return values
