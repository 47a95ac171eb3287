"""Read a server's settings from a YAML file and from flags, and say what is wrong with them."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.env_server.common.settings import ConfigurationError, Section, ServerSettings
from rollgym.suggestions import near_names

# A model's own `register` leaves no room for a setting of that name.
_SHORTER = {"register_with": ("--register",)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, by sections. Absent flags leave nothing in the namespace."""
    for section in ServerSettings.__bases__:
        assert issubclass(section, Section)
        group = parser.add_argument_group(section.title)
        for name, field in section.model_fields.items():
            flags = ["--" + name.replace("_", "-"), *_SHORTER.get(name, ())]
            text = f"{field.description} {_default_text(field)}".strip().replace("%", "%%")
            form: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
            if field.annotation is bool:
                form["action"] = argparse.BooleanOptionalAction
            else:
                form["metavar"] = _metavar(name)
                if _is_repeatable(field):
                    form["action"] = "append"
            group.add_argument(*flags, **form)


def load_settings(flags: Mapping[str, Any], config: Path | None) -> ServerSettings:
    """Settings from a YAML file and flags; a flag wins over the file.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    values: dict[str, Any] = _read_yaml(config) if config is not None else {}
    for name, value in flags.items():
        values[name] = (
            _parse_mapping(name, value) if _is_mapping(ServerSettings.model_fields[name]) else value
        )
    return check_settings(values)


def check_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Settings from their values.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    unknown = [name for name in values if name not in ServerSettings.model_fields]
    if unknown:
        raise ConfigurationError("\n".join(_unknown_setting(name) for name in unknown))
    try:
        return ServerSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(error))) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"cannot read {path}: {why}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(f"{path} must hold a mapping of settings")
    return values


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _is_repeatable(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (dict, tuple)


def _metavar(name: str) -> str:
    if _is_mapping(ServerSettings.model_fields[name]):
        return "ENV=VALUE"
    return name.upper()


def _default_text(field: FieldInfo) -> str:
    if field.default in (None, False) or _is_repeatable(field):
        return ""
    return f"(default {field.default})"


def _parse_mapping(name: str, entries: Sequence[str]) -> dict[str, Any]:
    holds_json = name in {"operator_kwargs", "kwargs_schemas"}
    values: dict[str, Any] = {}
    for entry in entries:
        key, separator, value = entry.partition("=")
        if not separator:
            raise ConfigurationError(f"{name}: {entry!r} is not ENV=VALUE")
        try:
            values[key] = json.loads(value) if holds_json else value
        except (ValueError, RecursionError) as error:
            # Nested too deep, too: it is parsed by recursion.
            raise ConfigurationError(f"{name}: the value for {key} is not JSON: {error}") from error
    return values


def _unknown_setting(name: str) -> str:
    near = near_names(name, ServerSettings.model_fields)
    return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return lines
