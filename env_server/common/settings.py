"""Everything an operator can set, with its default, its flag and its meaning, read from a YAML file and from flags."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.env_server.common.setting_sections import (
    AccessSettings,
    CatalogSettings,
    GatewaySettings,
    MessageSettings,
    NodeSettings,
    ProcessSettings,
    RaySettings,
    SandboxSettings,
    Section,
    SessionSettings,
    TelemetrySettings,
    TimeoutSettings,
    WorkerSettings,
)
from rollgym.suggestions import near_names

# A model's own `register` leaves no room for a setting of that name.
_SHORTER = {"register_with": ("--register",)}


class Settings(
    ProcessSettings,
    WorkerSettings,
    RaySettings,
    CatalogSettings,
    TimeoutSettings,
    SessionSettings,
    AccessSettings,
    MessageSettings,
    SandboxSettings,
    GatewaySettings,
    NodeSettings,
    TelemetrySettings,
):
    """Settings of one server. A YAML file (`--config`) and the flags use the same names, without sections."""

    @property
    def max_restore_bytes(self) -> int:
        """The largest request that restores a session: the longest episode, plus the size of an ordinary request."""
        return self.max_episode_bytes + self.max_request_bytes

    @property
    def max_portable_bytes(self) -> int:
        """The largest reply that holds a portable episode: every episode can be exported, and then restored."""
        return max(self.max_reply_bytes, self.max_restore_bytes)

    def request_limit(self, op: str) -> int:
        """The bytes that a request of an operation may have."""
        return self.max_restore_bytes if op == "restore" else self.max_request_bytes

    @model_validator(mode="after")
    def _ray_where_asked_for(self) -> "Settings":
        if self.workers != "ray":
            for name, field in RaySettings.model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} is for `workers: ray` only")
        elif self.ray_min_actors > self.ray_max_actors:
            raise ValueError("ray_min_actors is more than ray_max_actors")
        elif self.processes > 1 and self.ray_address is None:
            raise ValueError(
                "several I/O processes share one Ray cluster: start it (`ray start --head`) and set "
                "ray_address to auto"
            )
        return self

    @model_validator(mode="after")
    def _one_gateway_process(self) -> "Settings":
        if self.gateway and self.processes > 1:
            raise ValueError("a gateway has one I/O process: start several gateways that nodes register with")
        return self

    @model_validator(mode="after")
    def _journal_of_gateways(self) -> "Settings":
        if self.journal_url is not None and not self.gateway:
            raise ValueError("journal_url is for gateways (gateway): a server by itself has state_dir")
        return self

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> "Settings":
        if self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"no tokens are configured, so the server binds to loopback only, not to {self.host!r}: "
                "set token_file (see `roll-serve token --help`) or host 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    return host in {"localhost", "::1"} or host.startswith("127.")


class ConfigurationError(Exception):
    """Settings that cannot be used; the message is for the operator."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, by sections. Absent flags leave nothing in the namespace."""
    for section in Settings.__bases__:
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


def load_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Settings from a YAML file and flags; a flag wins over the file.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    values: dict[str, Any] = _read_yaml(config) if config is not None else {}
    for name, value in flags.items():
        values[name] = _parse_mapping(name, value) if _is_mapping(Settings.model_fields[name]) else value
    return check_settings(values)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from their values.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    unknown = [name for name in values if name not in Settings.model_fields]
    if unknown:
        raise ConfigurationError("\n".join(_unknown_setting(name) for name in unknown))
    try:
        return Settings.model_validate(values)
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
    near = near_names(name, Settings.model_fields)
    return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return lines
