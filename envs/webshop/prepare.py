"""Builds a catalogue before a server needs it: `python -m rollgym.envs.webshop.prepare --data-dir DIRECTORY`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rollgym.envs.webshop.catalogue import open_catalogue
from rollgym.envs.webshop.sources import CatalogueError
from rollgym.user_paths import user_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a catalogue unless it was built before; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollgym.envs.webshop.prepare", description=__doc__)
    parser.add_argument(
        "--data-dir", type=user_path, help="Directory with WebShop's files; the made-up shop if absent."
    )
    parser.add_argument("--num-products", type=int, help="Products to read; all if absent.")
    parser.add_argument("--cache-dir", type=user_path, help="Where catalogues are kept.")
    given = parser.parse_args(arguments)
    if given.num_products is not None and (given.num_products < 1 or given.data_dir is None):
        parser.error("--num-products must be at least 1, and is for the files of --data-dir only")
    try:
        catalogue = open_catalogue(_text(given.data_dir), given.num_products, _text(given.cache_dir))
    except CatalogueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    goals = ", ".join(f"{len(catalogue.goals(kind))} {kind} goals" for kind in ("human", "synthetic"))
    sys.stdout.write(f"{len(catalogue)} products, {goals}\n")
    return 0


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


if __name__ == "__main__":
    sys.exit(main())
