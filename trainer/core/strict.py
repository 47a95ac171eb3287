"""The base of every settings class: implausible values are refused, and values never change after loading.

Names that settings and options had before are understood for one release, with a warning that names the new one.
"""

import re
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rollgym.clients.process.modules import FormerNameWarning
from rollgym.clients.protocol.addresses import server_parts
from rollgym.suggestions import near_names
from rollgym.trainer.core.names_of_others import NAMES_OF_OTHERS
from rollgym.user_paths import expand_user

WRONG_VALUE = "wrong_value"
"""Type of the errors whose context names the `key` and the `reason`."""

_LARGEST = 2**53
"""The largest whole number that every reader of JSON and YAML reads as it was written."""

_LIKE_A_NUMBER = re.compile(r"[-+]?[0-9][0-9_:.]*|[-+]?0[xXoObB][0-9a-fA-F_]+")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?")
_LONGEST_SHOWN = 60
_LONGEST_LIST = 120
"""Characters of a list of keys that a message of one line has room for."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""How many of something of which each takes memory."""
Amount = Annotated[int, Field(ge=1, le=1_000_000_000)]
"""How many of something that takes time, or that is only compared with: far more is a slip of the keyboard."""
Seconds = Annotated[float, Field(gt=0.0, le=31_536_000.0)]
"""A time to wait, at most a year."""
Weight = Annotated[float, Field(gt=0.0, le=1e9)]
"""A share relative to others."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A part of something: none of it and all of it, too."""
LearningRate = Annotated[float, Field(gt=0.0, le=100.0)]
"""A step of AdamW moves each weight by about as much: what is far larger is a slip of the keyboard."""


def _json_object(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if wrong := next(_too_large(value, ""), None):
        raise ValueError(wrong)
    return value


def _too_large(value: Any, place: str) -> Iterator[str]:
    """Yield what is wrong with the integers in nested lists and mappings."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _too_large(part, f"{place}.{key}" if place else str(key))
    elif isinstance(value, int) and abs(value) >= _LARGEST:
        yield f"{place} has {value.bit_length()} bits, and integers on the wire stay below 2**53"


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_json_object)]
"""A JSON object that is sent over the wire unchanged."""


def _server_url(value: str) -> str:
    server_parts(value, ("http", "https", "ws", "wss"))
    return value


UserPath = Annotated[str, AfterValidator(expand_user)]
"""A file or folder of this machine, or the name of a model: `~` is the home folder."""
ServerUrl = Annotated[str, AfterValidator(_server_url)]
"""The address of an environment server."""


class Settings(BaseModel):
    """A frozen group of settings. Numbers are finite, and booleans are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Return those of some settings, or of the whole group, that differ from their defaults.

        An explicit default value cannot be distinguished from a default that a run recorded.
        """
        fields = type(self).model_fields
        return [name for name in names or fields if getattr(self, name) != fields[name].default]

    @model_validator(mode="before")
    @classmethod
    def _suggest_near_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for key in values:
            if key not in cls.model_fields:
                raise ValueError(f"unknown key '{str(key)[:_LONGEST_SHOWN]}'; {_nearest_key(str(key), cls)}")
            annotation = cls.model_fields[key].annotation
            values[key] = _off(values[key], cls.model_fields[key])
            _refuse_what_only_looks_like_it(key, values[key], annotation)
        return values


def _nearest_key(key: str, settings: type[BaseModel]) -> str:
    """Return the key that was probably meant, of a group of settings or of the groups in it; or where all are."""
    every = list(_paths(settings))
    if (path := NAMES_OF_OTHERS.get(key)) is not None:
        # In a group, its own keys are named without the group.
        end = next((path[at:] for at in _starts(path) if path[at:] in every), None)
        if end is not None:
            return f"did you mean '{end}'?"
    paths: dict[str, str] = {}
    # The least deep first: `dpo.loss` was meant rather than a critic's loss.
    for path in sorted(every, key=lambda path: path.count(".")):
        paths.setdefault(path.rpartition(".")[2], path)
    near = near_names(key, settings.model_fields)
    # A slip at the end of a key of this group is likelier than an equal key elsewhere.
    if key in paths and not (near and key.startswith(near[0])):
        return f"did you mean '{paths[key]}'?"
    if near:
        return f"did you mean '{near[0]}'?"
    if near := near_names(key, paths):
        return f"did you mean '{paths[near[0]]}'?"
    known = ", ".join(settings.model_fields)
    return (
        f"known keys: {known}"
        if len(known) <= _LONGEST_LIST
        else "docs/configuration.md lists those that there are"
    )


def _starts(path: str) -> list[int]:
    """Return the places in a path where a key begins."""
    return [0, *(at + 1 for at, sign in enumerate(path) if sign == ".")]


def _paths(settings: type[BaseModel], depth: int = 3) -> Iterator[str]:
    """Yield the paths of all keys, those of the group itself first, then those of the groups in it in their order."""
    yield from settings.model_fields
    if depth == 1:
        return
    # Groups that every run has come before those that are left out by default.
    fields = sorted(settings.model_fields.items(), key=lambda item: item[1].default is None)
    for name, field in fields:
        if typing.get_origin(field.annotation) in (list, tuple, dict):
            continue  # Their keys have an index or a name before them, which nobody can guess.
        for model in models_of(field):
            yield from (f"{name}.{path}" for path in _paths(model, depth - 1))


def _off(value: Any, field: FieldInfo) -> Any:
    """Return "off" where YAML took the word for a truth value: as a value, as a part's name, or as its kind."""
    kinds: list[Any] = [
        model.model_fields["kind"].annotation for model in models_of(field) if "kind" in model.model_fields
    ]
    is_kind = any(_names(kind, "off") for kind in kinds)
    if value is False and (is_kind or _names(field.annotation, "off")):
        return "off"
    if is_kind and isinstance(value, dict) and value.get("kind") is False:
        return value | {"kind": "off"}
    return value


def _names(annotation: Any, word: str) -> bool:
    """Whether a word is one of those that an annotation lists."""
    return annotation == word or any(_names(part, word) for part in typing.get_args(annotation))


def _refuse_what_only_looks_like_it(key: str, value: Any, annotation: Any) -> None:
    """Refuse booleans for other types, which Python takes for 1 and 0, and ambiguous or absurdly large numbers."""
    if _takes(annotation, JsonValue):
        return  # the environment's own, which knows what it takes
    parts = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict) and typing.get_origin(annotation) is dict:
        parts = list(value.values())
    for part in parts:
        if isinstance(part, bool) and not _takes(annotation, bool):
            shown = str(part).lower()
            reason = f"{shown} is a truth value; give what is meant, in quotes if it is the word '{shown}'"
            raise PydanticCustomError(WRONG_VALUE, "{key}: {reason}", {"key": key, "reason": reason})
        if isinstance(part, str) and _is_odd_number(part) and _is_of_numbers(annotation):
            reason = (
                f"{part[:_LONGEST_SHOWN]!r} could be read as one number or another: write it in plain digits, such as "
                "10, 0.5 or 1e-6, without zeros before them, '_' or ':'"
            )
            raise PydanticCustomError(WRONG_VALUE, "{key}: {reason}", {"key": key, "reason": reason})
        if type(part) is int and abs(part) > _LARGEST:
            reason = f"a number of {len(str(abs(part)))} digits is larger than any that can be meant"
            raise PydanticCustomError(WRONG_VALUE, "{key}: {reason}", {"key": key, "reason": reason})


def _is_odd_number(text: str) -> bool:
    """Whether a text consists of characters of numbers, but is not in the form of a number."""
    return _LIKE_A_NUMBER.fullmatch(text) is not None and _NUMBER.fullmatch(text) is None


def _is_of_numbers(annotation: Any) -> bool:
    return (_takes(annotation, int) or _takes(annotation, float)) and not _takes(annotation, str)


def _takes(annotation: Any, kind: Any) -> bool:
    """Whether a value of a type may be meant by an annotation."""
    if annotation is kind:
        return True
    return any(_takes(part, kind) for part in typing.get_args(annotation))


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The settings classes that may stand in a field: those of each kind of ours, or those that it names."""
    kinds = [model for each in field.metadata for model in getattr(each, "ours", ())]
    return kinds or models_in(field.annotation)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def with_current_keys(values: Any, former_keys: Mapping[str, str], section: str) -> Any:
    """Return the settings of a section under their present names, and warn of each former name.

    Args:
        values: The settings, or anything else, which is returned unchanged.
        former_keys: The present name of each key, by its former name.
        section: The section's name, for the warning.

    Raises:
        ValueError: If a setting is given by both names.
    """
    former = [key for key in former_keys if isinstance(values, Mapping) and key in values]
    for key in former:
        if former_keys[key] in values:
            raise ValueError(f"'{key}' is the former name of '{former_keys[key]}', which is given, too")
        warn_of_former_name(f"{section}.{key}", f"{section}.{former_keys[key]}")
    return {former_keys.get(key, key): value for key, value in values.items()} if former else values


def warn_of_former_name(former: str, current: str) -> None:
    """Warn of a name that was given and is another now."""
    warnings.warn(f"{former} is called {current} now", FormerNameWarning, stacklevel=3)
