"""A package of somebody else's, as `pip install --target` leaves it: a module, and its entry points."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from rollgym.clients.protocol.upstream_protocols import GROUP as UPSTREAM_PROTOCOLS
from rollgym.clients.replies.formats.table import GROUP as CALL_FORMATS
from rollgym.env_server.protocols.faces import GROUP as FACES
from rollgym.trainer.algorithms.advantage_settings import AdvantageSettings
from rollgym.trainer.algorithms.group_filters import FilterSettings
from rollgym.trainer.algorithms.surrogates import SurrogateSettings
from rollgym.trainer.config.backend import BACKENDS_BY_NAME
from rollgym.trainer.config.inference import SERVERS
from rollgym.trainer.config.output import GROUP

GROUPS_OF_RUNS = frozenset(
    {get_args(part)[1].group for part in (AdvantageSettings, SurrogateSettings, FilterSettings)}
    | {BACKENDS_BY_NAME.group, SERVERS.group, GROUP, CALL_FORMATS}
)
"""Entry points by which packages add kinds to a run."""
GROUPS_OF_SERVERS = frozenset({UPSTREAM_PROTOCOLS, FACES})
"""Entry points by which packages add kinds to a server."""


def install(site: Path, name: str, code: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Write a module and what says that it is installed.

    Args:
        site: A folder that is on the path of modules.
        name: Of the package, and of its one module.
        code: The module.
        entries: What it adds: `module:attribute` by the name in a group of entry points.
    """
    (site / f"{name}.py").write_text(code)
    information = site / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, added in entries.items()
        for line in (f"[{group}]", *(f"{key} = {path}" for key, path in added.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join([*lines, ""]))
