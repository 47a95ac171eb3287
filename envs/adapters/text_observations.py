"""Observations of any Gymnasium space as text that can be read."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from rollgym.clients.protocol.spaces import UnicodeText

_MOST_NUMBERS = 2_000
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
        if count > _MOST_NUMBERS:
            raise ValueError(
                f"observations of {count} numbers (shape {space.shape}) are no text to read: {_REMEDY}"
            )
    elif not isinstance(space, spaces.Discrete | spaces.Text | UnicodeText):
        raise ValueError(f"observations in {space} have no text form: {_REMEDY}")
