"""What comes with the package, shown: configurations, presets of algorithms, and the folder of a first run."""

import re
import shlex
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import yaml

from rollgym.clients.process.terminal import visible
from rollgym.clients.scaffold.folder import FolderError, rendered, write_folder
from rollgym.trainer.algorithms.presets import PAPERS, PRESETS, known_name
from rollgym.trainer.algorithms.token_settings import CORRECTIONS
from rollgym.trainer.config.load import EXAMPLES, ShippedConfig, shipped_config, shipped_configs
from rollgym.trainer.core.errors import ConfigError

_WIDTH, _INDENT = 80, "    "


def configs(name: str | None) -> int:
    """Print the list of configurations, or the text of one.

    Args:
        name: A configuration; None lists them.

    Raises:
        ConfigError: If the configuration is unknown.
    """
    lines = (
        listed_configs()
        if name is None
        else [shipped_config(name).path.read_text(encoding="utf-8").rstrip("\n")]
    )
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def listed_configs() -> list[str]:
    """Return the list of configurations, in at most 80 columns."""
    lines = []
    for config in shipped_configs().values():
        lines.append(config.name)
        lines += textwrap.wrap(config.summary, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return [
        *lines,
        "",
        "roll-train config NAME              print one",
        "roll-train --config NAME            train with it",
        "roll-train init FOLDER --from NAME  write a folder with it, to change",
    ]


_CONFIG = "run.yaml"
_REWARD = "reward:rewards"
_ROLLOUT = re.compile(r"^rollout:(\s*\{)?", re.MULTILINE)
_FILE = re.compile(r"\bexamples/([\w.-]+(?:/[\w.-]+)*)")
_PAGE = re.compile(r"\bdocs/([\w-]+(?:/[\w-]+)*)\.md\b")
_MODULE = re.compile(r"\b(?:rollgym\.)?examples\.([\w.]+)(?=:\w)")


def init(folder: Path | None, config: str) -> int:
    """Write the folder of a run, and print what it holds and what to type next.

    Args:
        folder: A path that does not exist; None for the configuration's name, in the working directory.
        config: The configuration's name.

    Raises:
        ConfigError: If the configuration is unknown, or the folder cannot be written.
    """
    shipped = shipped_config(config)
    folder = Path(shipped.path.stem) if folder is None else folder
    files = run_files(shipped, folder.name)
    try:
        write_folder(folder, files)
    except FolderError as error:
        raise ConfigError(str(error)) from error
    wrote = f"wrote {folder}: {', '.join(files)}"
    following = f"next: cd {shlex.quote(str(folder))} && roll-train --config {_CONFIG}"
    sys.stdout.write(f"{visible(wrote)}\n{visible(following)}\n")
    return 0


def run_files(shipped: ShippedConfig, title: str) -> dict[str, str]:
    """Return the files of a run's folder, by path: the configuration with a reward function, and what both need.

    Args:
        shipped: The configuration. Files of the examples that it names are taken along.
        title: Title of the README.
    """
    text = shipped.path.read_text(encoding="utf-8")
    output = yaml.safe_load(text)["output_dir"]
    text = text.replace(f"examples/{shipped.name}.yaml", _CONFIG)
    text, companions = _with_companions(_with_addresses(text))
    marks = {
        "ScaffoldTitle": visible(" ".join(title.split())),
        "ScaffoldConfig": shipped.name,
        "ScaffoldOutput": output,
    }
    return {_CONFIG: _with_reward(text), **rendered(("run",), marks), **companions}


def _with_addresses(text: str) -> str:
    """Return a configuration that names pages of the documentation by their addresses.

    A source tree that is not installed has no record of the addresses: the configuration then stays unchanged.
    """
    try:
        urls = metadata("rollgym").get_all("Project-URL") or ()
    except PackageNotFoundError:
        return text
    named = dict(url.split(", ", 1) for url in urls)
    return _PAGE.sub(rf"{named['Documentation']}\1.html", text)


def _with_reward(text: str) -> str:
    """Return a configuration whose section `rollout` names the reward function."""

    def named(found: re.Match[str]) -> str:
        return f"{found[0]}reward: {_REWARD}, " if found[1] else f"{found[0]}\n  reward: {_REWARD}"

    text, count = _ROLLOUT.subn(named, text, count=1)
    return text if count else f"{text}rollout: {{reward: {_REWARD}}}\n"


def _with_companions(text: str) -> tuple[str, dict[str, str]]:
    """Return a configuration that names files of the examples by their paths beside it, and these files."""
    companions: dict[str, str] = {}

    def taken(name: str) -> str | None:
        path = EXAMPLES / name
        if not path.is_file():
            return None
        companions[name] = path.read_text(encoding="utf-8")
        return name

    text = _FILE.sub(lambda found: taken(found[1]) or found[0], text)
    text = _MODULE.sub(
        lambda found: found[1] if taken(f"{found[1].replace('.', '/')}.py") else found[0], text
    )
    return text, companions


_NAME = 23
"""Columns before the line of a preset."""


def algorithms(name: str | None) -> int:
    """Print all presets, or the resolved settings of one, in at most 80 columns.

    Args:
        name: A preset or a correction; None lists them.

    Raises:
        ConfigError: If the preset is unknown.
    """
    sys.stdout.write("\n".join([*(listed_algorithms() if name is None else resolved(name)), ""]))
    return 0


def listed_algorithms() -> list[str]:
    """Return the list of presets and corrections."""
    lines = ["presets, for algorithm=NAME:", ""]
    for paper in PAPERS.values():
        lines += _entry(paper.name, paper.line, paper.source)
    lines += ["", "corrections of the mismatch, for algorithm.correction=NAME:", ""]
    for name, correction in CORRECTIONS.items():
        lines += _entry(name, correction.line, correction.source)
    return [*lines, "", "roll-train algorithms NAME shows what one of them sets"]


def resolved(name: str) -> list[str]:
    """Return a preset's settings as YAML, with the sources of its numbers as comments.

    Raises:
        ConfigError: If the preset is unknown.
    """
    if name in CORRECTIONS and name not in PRESETS:
        correction = CORRECTIONS[name]
        comments = [f"{name}: {correction.line}", f"source: {correction.source}"]
        return _page(comments, {"correction": correction.settings.model_dump(mode="json")})
    try:
        paper = PAPERS[known_name(name)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    comments = [f"{paper.name}: {paper.line}", f"source: {paper.source}"]
    if paper.notes:
        comments.append(paper.notes)
    return _page(comments, PRESETS[paper.name].model_dump(mode="json"))


def _page(comments: list[str], settings: dict[str, Any]) -> list[str]:
    lines = [f"# {line}" for comment in comments for line in textwrap.wrap(comment, _WIDTH - 2)]
    written = yaml.safe_dump({"algorithm": _kind_first(settings)}, sort_keys=False, width=_WIDTH)
    return [*lines, *written.splitlines()]


def _kind_first(value: Any) -> Any:
    """Return settings with the kind of each part at its top."""
    if isinstance(value, list):
        return [_kind_first(part) for part in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: name != "kind")
    return {name: _kind_first(value[name]) for name in names}


def _entry(name: str, line: str, source: str) -> list[str]:
    """Return a line of the list; a source that does not fit stands below it."""
    start = f"{name:<{_NAME}}{line}"
    whole = start if source == "-" else f"{start} ({source})"
    return [whole] if len(whole) <= _WIDTH else [start, f"{'':{_NAME}}({source})"]
