"""`roll-train init`: the folder of a first run, from a configuration that comes with the package."""

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import yaml

from rollgym.clients.process.terminal import visible
from rollgym.clients.scaffold.folder import FolderError, write_folder
from rollgym.clients.scaffold.templates import rendered
from rollgym.trainer.config.shipped import EXAMPLES, ShippedConfig, shipped_config
from rollgym.trainer.core.errors import ConfigError

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
