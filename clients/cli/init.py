"""`roll-env init`: the package of a new environment."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from rollgym.clients.cli.arguments import UsageError
from rollgym.clients.scaffold.folder import FolderError, write_folder
from rollgym.clients.scaffold.package import KINDS, NameRefusedError, package_files, package_names


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    kinds = "\n".join(f"  {kind:10}{what}" for kind, what in KINDS.items())
    parser = commands.add_parser(
        "init",
        help="write the package of a new environment",
        description="Write the package of a new environment into a new folder of the working directory: the\n"
        "environment, its entry point, tests, a Dockerfile and a README with the commands.",
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="such as word_ladder, whose id is WordLadder-v0")
    parser.add_argument("--kind", choices=tuple(KINDS), default="game", help="default: game")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the package, and print its files and the next commands."""
    try:
        names = package_names(options.name)
        files = package_files(names, options.kind)
        write_folder(Path(names.module), files)
    except (NameRefusedError, FolderError) as error:
        raise UsageError(str(error)) from error
    print(textwrap.fill(f"wrote {names.module}: {', '.join(files)}", 80, subsequent_indent="  "))
    print(f"next: cd {names.module} && pip install -e . && pytest && roll-env check {names.env_id}")
    return 0
