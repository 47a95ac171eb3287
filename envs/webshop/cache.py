"""Catalogues are built once on a machine and cached; other processes wait for the one that builds."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from rollgym.envs.webshop.catalogue import LOAD_SEED, Catalogue, build_catalogue
from rollgym.envs.webshop.sources import (
    CatalogueError,
    CatalogueSource,
    GeneratedSource,
    find_files,
    fingerprint,
)
from rollgym.user_paths import expand_user

_log = logging.getLogger(__name__)


def open_catalogue(
    data_dir: str | None = None, num_products: int | None = None, cache_dir: str | None = None
) -> Catalogue:
    """Open a catalogue; it is built first if that was never done. A process opens each one once.

    Args:
        data_dir: Directory with WebShop's files; None for the catalogue that ships with the project.
        num_products: Products to read of those files.
        cache_dir: Folder of the catalogues.

    Raises:
        CatalogueError: The files cannot be used, or nothing can be kept in `cache_dir`.
    """
    source: CatalogueSource = (
        GeneratedSource() if data_dir is None else find_files(Path(expand_user(data_dir)), num_products)
    )
    key = fingerprint(source, LOAD_SEED)
    folder = Path(expand_user(cache_dir)) if cache_dir is not None else default_cache()
    try:
        return _opened(_kept(source, folder / f"webshop-{key}"))
    except OSError as error:
        raise CatalogueError(
            f"no catalogue can be kept in {folder} ({error.strerror}): set the operator kwarg cache_dir, or "
            "XDG_CACHE_HOME, to a directory that can be written"
        ) from error


def default_cache() -> Path:
    """Return the default folder of the catalogues."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollgym"


@lru_cache(maxsize=4)
def _opened(folder: Path) -> Catalogue:
    return Catalogue(folder)


def _kept(source: CatalogueSource, folder: Path) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        _log.info("building the catalogue %s", folder)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            build_catalogue(source, unfinished)
            # All users may read it, no matter which one built it.
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
