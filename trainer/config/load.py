"""Read a run's settings: a YAML file, then `key=value` words from the command line, or a program's mapping.

The file may be one of those that come with the package, by name. Settings that a command does not read are refused,
and not ignored.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from rollgym.clients.process.modules import with_current_paths
from rollgym.clients.protocol.yaml_text import read_word, read_yaml, write_yaml
from rollgym.suggestions import did_you_mean, near_names, suggestion
from rollgym.trainer.config.data import FORMER_EVALUATION_KEYS
from rollgym.trainer.config.run import SECTIONS, RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.core.run_files import CONFIG_FILE
from rollgym.trainer.core.strict import WRONG_VALUE, models_of, warn_of_former_name, with_current_keys

EXAMPLES = Path(str(files("rollgym") / "examples"))
"""The folder of the examples: in the package, as in a clone."""

_PREFIX = "examples/"
_FOLDERS = ("", "one_gpu", "presets", "pretrained")
_SUFFIXES = (".yaml", ".yml")
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)")
_LONGEST_NAME = 100
_MOST_SUGGESTED = 2


@dataclass(frozen=True, slots=True)
class ShippedConfig:
    """A configuration that comes with the package.

    Attributes:
        name: Its name for `--config`: its path in the examples without its suffix, such as `presets/qwen2.5-7b-8gpu`.
        path: The file.
    """

    name: str
    path: Path

    @property
    def summary(self) -> str:
        """The first sentence of the comment at the top of the file."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        end = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
        comment = " ".join(line.removeprefix("#").strip() for line in lines[:end])
        found = _SENTENCE.match(comment)
        return (found[1] if found else comment).rstrip(".:")


def shipped_configs() -> dict[str, ShippedConfig]:
    """Return the configurations that come with the package, by name."""
    found = (path for folder in _FOLDERS for path in sorted((EXAMPLES / folder).glob("*.yaml")))
    names = ((path.relative_to(EXAMPLES).with_suffix("").as_posix(), path) for path in found)
    return {name: ShippedConfig(name, path) for name, path in names}


def shipped_config(name: str) -> ShippedConfig:
    """Return the configuration of a name.

    Args:
        name: With or without `examples/` before it and `.yaml` behind it.

    Raises:
        ConfigError: If none has this name.
    """
    found = _named(name)
    if found is None:
        raise ConfigError(f"no configuration of rollgym is called '{name[:_LONGEST_NAME]}': {_hint(name)}")
    return found


def find_config(path: Path) -> tuple[Path, bool]:
    """Return the file that a path or a name means, and whether it is one of the package's.

    A file that is there is taken before a configuration of the package, with or without the suffix `.yaml`.

    Raises:
        ConfigError: If there is neither.
    """
    # os.path, whose answer to a name that no file can have is no, too.
    for candidate in (path, *(path.with_name(f"{path.name}{suffix}") for suffix in _SUFFIXES if path.name)):
        if os.path.exists(candidate) and not os.path.isdir(candidate):
            return candidate, False
    if os.path.isfile(path / "run.yaml"):
        raise ConfigError(f"{path} is a folder: give --config {path / 'run.yaml'}")
    if (shipped := _named(path.as_posix())) is not None:
        return shipped.path, True
    if os.path.isfile(path / CONFIG_FILE):
        raise ConfigError(f"{path} is the folder of a run: give --config {path / CONFIG_FILE}")
    if os.path.isdir(path):
        raise ConfigError(f"cannot read {path}: it is a folder, not a file of settings")
    shown = str(path)[:_LONGEST_NAME]
    raise ConfigError(
        f"cannot read {shown}: neither a file nor a configuration of rollgym; {_hint(path.as_posix())}"
    )


def with_shipped_paths(values: Any) -> Any:
    """Return the settings of a configuration of the package with absolute paths in place of `examples/...`."""
    match values:
        case dict():
            return {key: with_shipped_paths(value) for key, value in values.items()}
        case list():
            return [with_shipped_paths(value) for value in values]
        case str() if values.startswith(_PREFIX):
            return str(EXAMPLES / values.removeprefix(_PREFIX))
        case _:
            return values


def _named(name: str) -> ShippedConfig | None:
    return shipped_configs().get(_bare(name))


def _bare(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    return next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), name)


def _hint(name: str) -> str:
    # Presets are often named without their folder.
    end = _bare(name).rpartition("/")[2]
    by_end = {known.rpartition("/")[2]: known for known in reversed(shipped_configs())}
    near = [end] if end in by_end else near_names(end, by_end, _MOST_SUGGESTED)
    return suggestion([by_end[each] for each in near]) or "`roll-train config` lists them"


_EVERY = (
    "name",
    "seed",
    "deterministic",  # what learns from examples is so in any case
    "output_dir",
    "steps",
    "threads",
    "model",
    "backend",
    "cluster",
    "optimizer",
    "checkpoint",
    "tracking",
    "prompt.template_kwargs",
    "prompt.chat_template",
)
_DEMONSTRATING = (
    "env_url",
    "env_token",
    "serve",
    "tasks",
    "prompt",
    "rollout.max_turns",
    "rollout.encoding",
    "rollout.server_timeout_s",
    "rollout.task_source",
    "rollout.temperature",  # divides the logits of the learner
)
"""Further keys that are read if experts play."""
_EXAMPLES = {
    "sft": "sft.data='[{path: chats.jsonl}]'",
    "dpo": "dpo.data='[{path: pairs.jsonl}]'",
    "reward": "reward.data='[{path: pairs.jsonl}]'",
    "distill": "distill.teachers='{main: {path: FOLDER}}'",
}


def check_command(settings: RunSettings, command: str) -> None:
    """Refuse settings that a command does not read, and a pipeline without its section.

    Args:
        settings: The run.
        command: "train", that of a pipeline, or one of "rollout", "eval" and "export".

    Raises:
        ConfigError: If there is such a setting; the message names it and what to do.
    """
    section = settings.section
    if command == "train":
        if section is not None:
            raise ConfigError(
                f"{section}: is read by `roll-train {section}`: use that command, or leave it out"
            )
        return
    if command not in SECTIONS:
        _check_shown(settings, command)
        return
    if section != command:
        raise no_section(command, section)
    read: tuple[str, ...] = (*_EVERY, command)
    if settings.sft is not None and settings.sft.expert is not None:
        read = (*read, *_DEMONSTRATING)
    elif settings.plays:
        read = tuple(name for name in RunSettings.model_fields if name != "algorithm")
    for key in _changed(_defaults(), settings.model_dump(mode="json")):
        if not any(key == name or key.startswith(f"{name}.") for name in read):
            raise ConfigError(f"{key} is not read by roll-train {command}: leave it out")


def no_section(command: str, other: str | None) -> ConfigError:
    """Return the message for a pipeline whose section is missing, perhaps beside another one's."""
    told = "" if other is None else f", and not {other}"
    return ConfigError(f"roll-train {command} reads the section '{command}'{told}: {_EXAMPLES[command]}")


def _check_shown(settings: RunSettings, command: str) -> None:
    """Refuse to play with what does not play, or nowhere."""
    if settings.reward is not None:
        raise ConfigError(
            f"reward: what was trained is a reward model, and roll-train {command} is for policies; the run's folder "
            "'model' is in Hugging Face layout already"
        )
    somewhere = settings.tasks or settings.datasets or settings.rollout.task_source
    if command != "export" and not somewhere:
        raise ConfigError(
            f"roll-train {command} plays episodes, and 'tasks' is empty: name at least one environment, for example "
            "tasks='[{env_id: FrozenLake-v0}]'"
        )


def _defaults() -> dict[str, Any]:
    plain = RunSettings.model_construct()
    return plain.model_dump(mode="json")


def _changed(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the keys, as deep as groups of settings go, whose values are not those of before."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [
            key
            for name in now
            for key in _changed(before[name], now[name], f"{prefix}.{name}" if prefix else str(name))
        ]
    return [] if before == now else [prefix]


_SECRET = frozenset({"env_token"})
_SECRET_NAME = re.compile(r"token$|key$|secret|password|authorization", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(\w://)[^/@\s]*@")
_MOST_SHOWN = 60
_NO_MAPPING = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""pydantic's words for what should be a mapping; its sentences name our classes."""
_JSON_TYPES = frozenset({"float", "int", "str", "bool", "list", "dict"})
_FORMER_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType({"evaluation": FORMER_EVALUATION_KEYS})
"""Sections whose settings are looked for by their former names, too, in what is laid over and in what lies under it."""


def load_settings(
    path: Path | None, overrides: Sequence[str] | Mapping[str, Any] = (), command: str = "train"
) -> RunSettings:
    """Return the settings of `path` with `overrides` laid over them.

    Args:
        path: A YAML file, or the name of a configuration of the package (`shipped_configs`); None for defaults.
        overrides: Words such as `rollout.group_size=16`, whose value is read by `read_word`; or a mapping of settings,
            whose sections are laid over the file's key by key.
        command: The command that reads them; a pipeline's command needs its section.

    Raises:
        ConfigError: If the file, a word or a value is not understood.
    """
    values: Any = {}
    if path is not None:
        path, shipped = find_config(path)
        try:
            values = read_yaml(path.read_text(encoding="utf-8"), path.name) or {}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not text in UTF-8: {error.reason}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of settings")
        if shipped:
            values = with_shipped_paths(values)
    return settings_from(values, overrides, command)


def load_own_settings(path: Path) -> RunSettings:
    """Return the settings that a run wrote of itself, as `load_settings` does.

    Raises:
        ConfigError: If the file or a value is not understood.
    """
    with warnings.catch_warnings():
        # Users need not rename keys that a run of an earlier release wrote.
        warnings.simplefilter("ignore", FutureWarning)
        return load_settings(path)


def settings_from(
    values: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any] = (), command: str = "train"
) -> RunSettings:
    """Return the settings that plain data say, with `overrides` laid over them, as `load_settings` does.

    Raises:
        ConfigError: If a word or a value is not understood.
    """
    values = _by_current_names(values)
    if isinstance(overrides, Mapping):
        _lay_over(values, _by_current_names(overrides), "")
    else:
        for word in overrides:
            _apply_override(values, word)
    if command in SECTIONS and values.get(command) is None:
        raise no_section(command, next((name for name in SECTIONS if values.get(name) is not None), None))
    try:
        return RunSettings.model_validate(with_current_paths(values))
    except ValidationError as error:
        raise ConfigError(_readable(error)) from error


def dump_settings(settings: RunSettings) -> str:
    """Return the resolved settings as YAML that `load_settings` reads back to equal settings."""
    return write_yaml(settings.model_dump(mode="json"))


def public_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the resolved settings as plain data without what looks like a secret, so that it can be shared."""
    return without_secrets(settings.model_dump(mode="json"))


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they were written to a file, without what looks like a secret."""
    return cast(
        "dict[str, Any]", _hidden({key: value for key, value in values.items() if key not in _SECRET})
    )


def _hidden(value: Any) -> Any:
    match value:
        case dict():
            return {
                key: "(hidden)" if isinstance(part, str) and _SECRET_NAME.search(str(key)) else _hidden(part)
                for key, part in value.items()
            }
        case list():
            return [_hidden(part) for part in value]
        case str():
            return _USER_IN_URL.sub(r"\1", value)
        case _:
            return value


def _apply_override(values: dict[str, Any], word: str) -> None:
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{word}' is not key=value, for example rollout.group_size=16")
    try:
        value = read_word(text, key)
    except yaml.YAMLError as error:
        if text[:1] in ("{", "[") and text[-1:] not in ("}", "]") and " " not in text:
            raise ConfigError(
                f"'{word}' is the beginning of a value, which the shell cut at a blank: put the whole word in quotes, "
                "for example 'tasks=[{env_id: FrozenLake-v0}]'"
            ) from error
        raise ConfigError(f"the value of '{word}' is not YAML: {error}") from error
    _put(values, key, value)


def _lay_over(values: dict[str, Any], overrides: Mapping[str, Any], place: str) -> None:
    for key, value in overrides.items():
        path = f"{place}{key}"
        if (
            isinstance(value, Mapping) and value and "kind" not in value
        ):  # which chooses what else may stand there
            _lay_over(values, value, f"{path}.")
        else:
            _put(values, path, value)


def _by_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _section_by_current_names(key, value) for key, value in values.items()}


def _section_by_current_names(section: str, value: Any) -> Any:
    try:
        return with_current_keys(value, _FORMER_KEYS.get(section, {}), section)
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error


def _current_key(key: str) -> str:
    """Return the path of a setting by the name that it has now, and warn if it had another."""
    section, _, rest = key.partition(".")
    name, *below = rest.split(".")
    current = _FORMER_KEYS.get(section, {}).get(name)
    if current is None:
        return key
    warn_of_former_name(f"{section}.{name}", f"{section}.{current}")
    return ".".join([section, current, *below])


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    key = _current_key(key)
    value = _section_by_current_names(key, value)
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


_QUOTED = re.compile("'([^']*)'")


def _readable(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        place = _place(problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == WRONG_VALUE:
            place, message = _place([*problem["loc"], problem["ctx"]["key"]]), problem["ctx"]["reason"]
        elif problem["type"] == "union_tag_not_found":
            message = f"names no kind, and there are several; for example {place}.kind=..., or a preset"
        elif problem["type"] == "union_tag_invalid":
            tag, kinds = str(problem["ctx"]["tag"]), _QUOTED.findall(problem["ctx"]["expected_tags"])
            hint = did_you_mean(tag, kinds, 3) or f"there are {', '.join(kinds)}"
            message = f"there is no kind {_shown(tag)}; {hint}"
        elif problem["type"] not in ("value_error", "missing") and place not in _SECRET:
            if problem["type"] in _NO_MAPPING:
                message = "must be a mapping, key: value"
            message += f", not {_shown(problem['input'])}"
            if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
                message += f' (in quotes it is text: "{problem["input"]}")'
        lines.append(f"{place}: {message}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def _place(location: Sequence[int | str]) -> str:
    """The key that a user wrote: without the kind of a part, which the location contains if there are several kinds."""
    names: list[str] = []
    model: type[BaseModel] | None = RunSettings
    kinds: dict[str, type[BaseModel]] = {}
    for part in location:
        if part in kinds:
            model, kinds = kinds[str(part)], {}
            continue
        if part not in _JSON_TYPES:  # pydantic's word for a part of a free value
            names.append(str(part))
        field = model.model_fields.get(str(part)) if model is not None else None
        if field is None:
            continue
        models = models_of(field)
        kinds = {kind_of(each): each for each in models} if len(models) > 1 else {}
        model = models[0] if len(models) == 1 else None
    return ".".join(names) or "settings"
