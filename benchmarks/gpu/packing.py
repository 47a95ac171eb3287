"""A folder of files that are small enough to be carried: the tree, packages and a model, in pieces to be joined there.

Files above `PIECE` bytes are cut; `packed.json` names every file with its length and SHA-256, so that what did not
arrive whole is told before anything runs. Only the standard library is used: this runs before packages are there.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PIECE = 28 * 2**20
"""Bytes of the largest file."""
LIST = "packed.json"


class PackedFilesError(Exception):
    """What was carried is not what was packed."""


def cut(source: Path, folder: Path, name: str, piece: int = PIECE) -> list[str]:
    """Write a file under a name in a folder, in pieces if it is longer than one; return the names written."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with source.open("rb") as stream:
        first = stream.read(piece)
        if source.stat().st_size <= piece:
            target.write_bytes(first)
            return [name]
        number, block = 0, first
        while block:
            part = f"{name}.part{number:03d}"
            (folder / part).write_bytes(block)
            written.append(part)
            number, block = number + 1, stream.read(piece)
    return written


def write_list(folder: Path, files: dict[str, tuple[str, list[str]]], about: dict[str, str]) -> None:
    """Write what a folder holds.

    Args:
        folder: The folder.
        files: For each name, the SHA-256 of the whole and the pieces, in order.
        about: What else is to be known.
    """
    content = {
        "about": about,
        "files": {name: {"sha256": sha, "pieces": of} for name, (sha, of) in files.items()},
    }
    (folder / LIST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def joined(packed: Path, target: Path) -> list[Path]:
    """Join the pieces of all packed files, and return the files.

    Raises:
        PackedFilesError: If one is missing, or is not what was packed.
    """
    try:
        content = json.loads((packed / LIST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackedFilesError(
            f"{packed} has no {LIST}: it was not made by benchmarks/gpu/pack.py"
        ) from error
    found = []
    for name, file in content["files"].items():
        whole = target / name
        whole.parent.mkdir(parents=True, exist_ok=True)
        if not whole.exists() or sha256(whole) != file["sha256"]:
            _join([packed / piece for piece in file["pieces"]], whole)
            if sha256(whole) != file["sha256"]:
                raise PackedFilesError(
                    f"{name} is not what was packed: carry its pieces again: {file['pieces']}"
                )
        found.append(whole)
    return found


def _join(pieces: Iterable[Path], whole: Path) -> None:
    with whole.open("wb") as stream:
        for piece in pieces:
            try:
                stream.write(piece.read_bytes())
            except FileNotFoundError as error:
                raise PackedFilesError(f"{piece} is missing") from error


def unpacked(packed: Path, work: Path) -> tuple[list[str], Path | None]:
    """Install what was packed into a folder, without a network.

    Args:
        packed: The folder that `pack.py` made.
        work: Where packages and the model go.

    Returns:
        The folder of packages, for the path, and the model's folder or file, if one was packed.

    Raises:
        PackedFilesError: If something is missing or damaged, or pip refuses it.
    """
    files = joined(packed, work / "packed")
    # dill, and with it datasets, knows packages by this name of their folder, and pickles what lies elsewhere by value.
    site = work / "site-packages"
    wheels = [str(file) for file in files if file.suffix == ".whl"]
    if wheels and not (site / ".whole").exists():
        words = [
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
            "--upgrade",
            "--target",
            str(site),
        ]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *words,
            *wheels,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PackedFilesError(f"pip does not install the packages: {done.stderr.strip()[-500:]}")
        (site / ".whole").touch()
    models = [file for file in files if file.parent.name == "model"]
    if not models:
        return [str(site)], None
    return [str(site)], models[0] if models[0].suffix == ".gguf" else models[0].parent
