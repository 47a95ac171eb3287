"""Texts of an observation or an info that could be repeated as an action: places where an answer may lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rollgym.clients.audit.policies import Wording, takes_text

_MAX_TEXT = 500
_LONGEST_READ = 20_000
_MAX_ITEMS = 12
_MAX_DEPTH = 6
_ENDS = 6
_NAMED = re.compile(
    r"(?:answer|solution|target|goal|secret|key|label|correct|expected|reference)\w*+\W+(\S+)", re.IGNORECASE
)
_APART = frozenset({"state", "anchor", "metrics"})
"""Keys of info that the protocol hides from policies."""
_NO_ANSWERS = frozenset(
    {"success", "action_is_valid", "format_penalty", "env_reward", "metrics", "instruction"}
)

Read = Callable[[Any, Mapping[str, Any], int], Any]


@dataclass(frozen=True)
class Extract:
    """A way to find an action in an answer of the server.

    Attributes:
        name: The place of the action, for people.
        apart: Whether the protocol hides that place from policies.
        read: Returns the action for an observation, an info and the number of the step; None if it finds none.
    """

    name: str
    apart: bool
    read: Read


def extracts(
    space: Space[Any], observation: Any, info: Mapping[str, Any], wording: Wording, *, reads_instruction: bool
) -> list[Extract]:
    """Return all places of this observation and info that may hold an action.

    Args:
        space: The action space.
        observation: The observation of a reset.
        info: The info of the same reset.
        wording: The form of texts.
        reads_instruction: Whether the instruction differs between tasks, so that it may hold an answer.
    """
    found = []
    for name, path in _leaves(info, ()):
        if path[0] in _NO_ANSWERS or (path[0] == "available_actions" and path[1:] not in ((0,), (-1,))):
            continue
        read = _at_path(path)
        apart = path[0] in _APART
        found.append(Extract(f"info{name}", apart, _acting(space, wording, read)))
        found.append(
            Extract(f"info{name}, one after the other", apart, _acting(space, wording, _by_step(read)))
        )
    if isinstance(observation, str):
        found += _text_extracts("the observation", space, wording, lambda seen, _info, _step: seen)
    else:
        for name, path in _leaves(observation, ()):
            read = _at_path(path, in_observation=True)
            found.append(Extract(f"observation{name}", False, _acting(space, wording, read)))
    if reads_instruction:
        found += _text_extracts(
            "the instruction", space, wording, lambda _seen, info, _step: info.get("instruction")
        )
    return found


def _text_extracts(where: str, space: Space[Any], wording: Wording, text: Read) -> Iterator[Extract]:
    def words(pattern: str, index: int) -> Read:
        compiled = re.compile(pattern)

        def read(observation: Any, info: Mapping[str, Any], step: int) -> Any:
            found = compiled.findall(str(text(observation, info, step))[:_LONGEST_READ])
            return found[index] if -len(found) <= index < len(found) else None

        return read

    def named(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        found = _NAMED.findall(str(text(observation, info, step))[:_LONGEST_READ])
        return found[-1].strip("\"'.,;:()[]<>") if found else None

    yield Extract(f"what {where} calls answer, target or the like", False, _acting(space, wording, named))
    for kind, pattern, count in (
        ("word", r"\w+", _ENDS),
        ("number", r"-?\d+(?:\.\d+)?", 3),
        ("line", r"[^\n]+", 2),
    ):
        for index in (*range(count), *range(-count, 0)):
            from_end = f"{kind} {index + 1}" if index >= 0 else f"{kind} {-index} from the end"
            yield Extract(f"{from_end} of {where}", False, _acting(space, wording, words(pattern, index)))


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Give each place in nested data that holds a scalar, a short text or a list of them."""
    if len(path) > _MAX_DEPTH:
        return
    name = "".join(f"[{part!r}]" for part in path)
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(value, np.ndarray):
        if value.ndim == 0 or value.size <= _MAX_ITEMS:
            yield name, path
        if value.ndim == 1:
            for index in range(min(len(value), _MAX_ITEMS)):
                yield f"{name}[{index}]", (*path, index)
    elif isinstance(value, (list, tuple)):
        if path:
            yield name, path
        for index in (*range(min(len(value), _MAX_ITEMS)), -1):
            if -len(value) <= index < len(value):
                yield from _leaves(value[index], (*path, index))
    elif isinstance(value, str):
        if len(value) <= _MAX_TEXT:
            yield name, path
    elif isinstance(value, (int, float, np.integer, np.floating)):
        yield name, path


def _at_path(path: Sequence[Any], *, in_observation: bool = False) -> Read:
    def read(observation: Any, info: Mapping[str, Any], _step: int) -> Any:
        value: Any = observation if in_observation else info
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, (list, tuple, np.ndarray)) and isinstance(part, int):
                value = value[part] if -len(value) <= part < len(value) else None
            else:
                return None
        return value

    return read


def _by_step(read: Read) -> Read:
    """Read the place as a list, or as words, and return the element of the step."""

    def one(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        value = read(observation, info, step)
        if isinstance(value, str):
            value = re.findall(r"[\w.+-]+", value)
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            return None
        return value[step] if step < len(value) else None

    return one


def _acting(space: Space[Any], wording: Wording, read: Read) -> Read:
    """Turn the text found into an action of the space; None if it is not one."""

    def act(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        value = read(observation, info, step)
        if value is None or isinstance(value, bool):
            return None
        if takes_text(space):
            if isinstance(value, (str, int, float, np.integer, np.floating)):
                return wording.write(str(value))
            return None
        if isinstance(space, spaces.Discrete):
            return _whole(value) if _whole(value) in space else None
        fits = isinstance(value, np.ndarray) and value.shape == space.shape and value in space
        return value if fits else None

    return act


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?\d{1,9}", value) else None
    if isinstance(value, np.ndarray):
        if value.size != 1:
            return None
        value = value.item()
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    number = float(value)
    return int(number) if abs(number) < 2**53 and number.is_integer() else None
