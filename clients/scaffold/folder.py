"""Writes a new folder from templates: completely or not at all, and never over existing files.

Templates are readable files with marks that are replaced by names.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
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


_ROOT = files("rollgym.clients.scaffold") / "templates"
_COMPILED = "__pycache__"


def rendered(templates: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the files of templates, with names in place of their marks.

    Args:
        templates: Folders of `templates/`; a file of a later one replaces that of an earlier one.
        names: The text that replaces each mark, in paths and in texts.

    Returns:
        The texts, by path.
    """
    marks = re.compile("|".join(map(re.escape, names)))

    def named(text: str) -> str:
        return marks.sub(lambda found: names[found[0]], text)

    return {
        named(path): named(text) for template in templates for path, text in template_texts(template).items()
    }


def template_texts(template: str) -> dict[str, str]:
    """Return the files of a template as they stand, by path."""
    return dict(_texts(_ROOT / template, ""))


def _texts(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name == _COMPILED:
            continue
        if entry.is_dir():
            yield from _texts(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
