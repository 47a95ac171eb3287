"""`roll-train config`: the configurations that come with the package, each with a line, and the text of one."""

import sys
import textwrap

from rollgym.trainer.config.shipped import shipped_config, shipped_configs

_WIDTH, _INDENT = 80, "    "


def configs(name: str | None) -> int:
    """Print the list of configurations, or the text of one.

    Args:
        name: A configuration; None lists them.

    Raises:
        ConfigError: If the configuration is unknown.
    """
    lines = listed() if name is None else [shipped_config(name).path.read_text(encoding="utf-8").rstrip("\n")]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def listed() -> list[str]:
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
