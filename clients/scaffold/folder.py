"""Writes a new folder completely or not at all, and never overwrites files."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path


class FolderError(Exception):
    """The folder cannot be written; the message gives the reason and the remedy."""


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write a folder with text files.

    The files are written to a temporary folder beside it, which is then renamed: a full disk, a kill, or another
    process that writes the same folder leaves none that is half written.

    Args:
        folder: It must not exist; the folders above it are made.
        files: Text by path inside the folder.

    Raises:
        FolderError: If the folder exists, or cannot be written.
    """
    if os.path.lexists(folder):
        raise FolderError(f"{folder} exists already, and nothing is overwritten: give another name")
    temporary = folder.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, text in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        temporary.rename(folder)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        shutil.rmtree(temporary, ignore_errors=True)
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise FolderError(f"cannot write {folder}: {reason}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
