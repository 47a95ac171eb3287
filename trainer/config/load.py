"""Read a run's settings: a YAML file, then `key=value` words from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainer.config.run import RunSettings
from trainer.errors import ConfigError


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> RunSettings:
    """Return the settings of `path` with `overrides` laid over them.

    Args:
        path: A YAML file, or None for defaults.
        overrides: Words such as `rollout.group_size=16`; the value is read as YAML.

    Raises:
        ConfigError: If the file, a word or a value is not understood.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not text in UTF-8: {error.reason}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of settings")
    for word in overrides:
        _apply_override(values, word)
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_readable(error)) from error


def dump_settings(settings: RunSettings) -> str:
    """Return the resolved settings as YAML that `load_settings` reads back to equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply_override(values: dict[str, Any], word: str) -> None:
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{word}' is not key=value, for example rollout.group_size=16")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of '{word}' is not YAML: {error}") from error
    *parents, last = key.split(".")
    node: Any = values
    for parent in parents:
        node = _descend(node, parent, key)
    if isinstance(node, list):
        node[_list_index(node, last, key)] = value
    else:
        node[last] = value


def _descend(node: Any, name: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, name, key)]
    child = node.get(name)
    if name == "algorithm" and isinstance(child, str):
        child = node[name] = {"preset": child}
    if child is None:
        child = node[name] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"'{key}' goes through '{name}', which is a plain value")
    return child


def _list_index(node: list[Any], name: str, key: str) -> int:
    if not name.isdecimal() or int(name) >= len(node):
        raise ConfigError(f"'{key}': '{name}' is not an index below {len(node)}")
    return int(name)


def _readable(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"]) or "settings"
        lines.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
