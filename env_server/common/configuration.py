"""Settings from a YAML file and from flags."""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from env_server.common.settings import Settings

# A model's own `register` leaves no room for a setting of that name.
_SHORTER = {"register_with": ("--register",)}


class ConfigurationError(Exception):
    """Settings that cannot be used; the message is for the operator."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting. Absent flags leave nothing in the namespace."""
    for name, field in Settings.model_fields.items():
        flags = ["--" + name.replace("_", "-"), *_SHORTER.get(name, ())]
        text = f"{field.description} {_default_text(field)}".strip().replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                *flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif _is_repeatable(field):
            parser.add_argument(
                *flags, action="append", metavar=_metavar(name), default=argparse.SUPPRESS, help=text
            )
        else:
            parser.add_argument(*flags, metavar=_metavar(name), default=argparse.SUPPRESS, help=text)


def load_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Settings from a YAML file and flags; a flag wins over the file.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    values: dict[str, Any] = _read_yaml(config) if config is not None else {}
    for name, value in flags.items():
        values[name] = _parse_mapping(name, value) if _is_mapping(Settings.model_fields[name]) else value
    unknown = [name for name in values if name not in Settings.model_fields]
    if unknown:
        raise ConfigurationError("\n".join(_unknown_setting(name) for name in unknown))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(error))) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
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
    if _is_mapping(Settings.model_fields[name]):
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
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{name}: the value for {key} is not JSON: {error}") from error
    return values


def _unknown_setting(name: str) -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return lines
