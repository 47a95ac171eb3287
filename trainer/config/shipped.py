"""The configurations that come with the package, by name: those of the repository's `examples/`."""

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollgym.suggestions import near_names, suggestion
from rollgym.trainer.core.errors import ConfigError

EXAMPLES = Path(str(files("rollgym") / "examples"))
"""The folder of the examples: in the package, as in a clone."""

_PREFIX = "examples/"
_FOLDERS = ("", "one_gpu", "presets", "pretrained")
_SUFFIXES = (".yaml", ".yml")
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)")
_MOST_SHOWN = 100
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
        raise ConfigError(f"no configuration of rollgym is called '{name[:_MOST_SHOWN]}': {_hint(name)}")
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
    if os.path.isdir(path):
        raise ConfigError(f"cannot read {path}: it is a folder, not a file of settings")
    shown = str(path)[:_MOST_SHOWN]
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
