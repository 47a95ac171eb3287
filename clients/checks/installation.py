"""Whether `import rollgym` leads to one complete installation, here and in processes that are started here."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from rollgym.clients.checks.report import Finding, Status

HOME = Path(__file__).absolute().parents[2]
"""The package that is running."""
# Not imported: the code of an impostor must not run here. `-c` has the working directory on its
# path, as a script beside it has, and `python -m`.
_FIND = """
import importlib.util, json
spec = importlib.util.find_spec("rollgym")
print(json.dumps(spec and [spec.origin, list(spec.submodule_search_locations or [])]))
"""
_CHILD_TIMEOUT_S = 60.0
_SHOWN = 3


class _RecordedFile(NamedTuple):
    """A file of an installer's list.

    Attributes:
        name: Its name there.
        path: Where it is.
        digest: The kind of its digest, an equals sign and the digest; empty if it has none.
    """

    name: str
    path: Path
    digest: str

    def __str__(self) -> str:
        return self.name


def check_imports(home: Path = HOME, path: list[str] | None = None) -> Iterator[Finding]:
    """Compare the `rollgym` that a process in the working directory imports with the running one.

    Args:
        home: The package.
        path: The path to search for its installation; `sys.path` if it is None.
    """
    check = "import rollgym"
    found = subprocess.run(
        [sys.executable, "-c", _FIND], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    if found.returncode != 0:
        said = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
        yield Finding(check, Status.FAIL, f"Python does not start here: {said[-1]}", "see `python -c 'pass'`")
        return
    spec = json.loads(found.stdout.splitlines()[-1])
    if spec is None:
        yield Finding(
            check,
            Status.FAIL,
            f"{sys.executable} does not find it; this is {home}",
            "install it in this environment, or add its folder to PYTHONPATH",
        )
        return
    origin, places = spec
    place = Path(places[0] if places else origin)
    if _is_same(place, home):
        yield Finding(check, Status.PASS, str(home))
        return
    ours = _installed(distributions() if path is None else distributions(path=path))
    if any(_is_same(place, tree / "rollgym") for each in ours if (tree := _copied_tree(each)) is not None):
        yield Finding(
            check,
            Status.WARN,
            f"a Python that is started in {Path.cwd()} uses this clone, and not what was installed of it in {home}",
            "start it elsewhere, or install the clone with `pip install -e`",
        )
        return
    yield Finding(
        check,
        Status.FAIL,
        f"a Python that is started in {Path.cwd()} finds {origin or places[0]}, not {home}",
        "rename what is found, start elsewhere, or take its folder from PYTHONPATH",
    )


def check_installation(home: Path = HOME, path: list[str] | None = None) -> Iterator[Finding]:
    """Compare the installed files with the package that is running.

    Args:
        home: The package.
        path: The path to search for distributions; `sys.path` if it is None.
    """
    found = list(distributions() if path is None else distributions(path=path))
    yield from _others_inside(found)
    ours = _installed(found)
    if not ours:
        yield Finding("installation", Status.SKIP, f"{home} is used as it is, it is not installed")
        return
    used = ours[0]
    if not _is_same(_package(used), home):
        yield Finding(
            "installation",
            Status.FAIL,
            f"{home} is running, and {_package(used)} is installed",
            "take the first from PYTHONPATH, or uninstall the second",
        )
        return
    if len(ours) > 1:
        places = "; ".join(_place(each) for each in ours)
        yield Finding(
            "installations",
            Status.WARN,
            f"{len(ours)} are found, and the first is used: {places}",
            "`pip uninstall rollgym` until none is left, then install it once",
        )
    yield from _check_files(used, home)


def required(home: Path = HOME, path: list[str] | None = None) -> list[str]:
    """Return the names of the packages that are always needed; those of an extra or a platform carry a marker.

    Args:
        home: The package, whose source tree names them if it is not installed.
        path: The path to search for its installation; `sys.path` if it is None.
    """
    ours = _installed(distributions() if path is None else distributions(path=path))
    needed: Iterable[str] = ours[0].requires or () if ours else ()
    if not ours and (project := home.parent / "pyproject.toml").is_file():
        needed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = []
    for requirement in needed:
        name, _, marker = requirement.partition(";")
        if not marker:
            names.append(re.split(r"[^\w.-]", name.strip())[0])
    return names


def _installed(found: Iterable[Distribution]) -> list[Distribution]:
    """Return the installations of rollgym; an `egg-info` in a tree of sources, which lists no files, is none."""
    ours = {
        _place(each): each
        for each in found
        if _name(each) == "rollgym" and each.read_text("RECORD") is not None
    }
    return list(ours.values())


def _name(distribution: Distribution) -> str:
    # A broken installation may have no metadata, and then has no name.
    return str(distribution.metadata["Name"] or "") if distribution.metadata else ""


def _place(distribution: Distribution) -> str:
    origin = "editable, " if _editable_tree(distribution) else ""
    return f"{origin}{Path(str(distribution.locate_file(''))).resolve()}"


def _package(distribution: Distribution) -> Path:
    """Return the package that a distribution brings."""
    tree = _editable_tree(distribution)
    return Path(str(distribution.locate_file("rollgym"))) if tree is None else tree / "rollgym"


def _editable_tree(distribution: Distribution) -> Path | None:
    """Return the folder that an editable installation uses."""
    return _tree(distribution, editable=True)


def _copied_tree(distribution: Distribution) -> Path | None:
    """Return the folder that another one was copied from."""
    return _tree(distribution, editable=False)


def _tree(distribution: Distribution, *, editable: bool) -> Path | None:
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if "dir_info" not in origin or bool(origin["dir_info"].get("editable")) is not editable:
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _others_inside(found: Iterable[Distribution]) -> Iterator[Finding]:
    """Name other distributions that have written into this package: uninstalling them removes files of it."""
    for each in found:
        # Not `each.files`: large packages have ten thousand, and nearly always none of them is in question.
        if re.search(r"^rollgym/", each.read_text("RECORD") or "", re.MULTILINE) and _name(each) != "rollgym":
            name = _name(each) or _place(each)
            yield Finding(
                f"package {name}",
                Status.FAIL,
                "has files in rollgym/",
                f"pip uninstall {name}, then install rollgym again",
            )


def _check_files(distribution: Distribution, home: Path) -> Iterator[Finding]:
    """Compare the files with the list that the installer wrote."""
    files = _recorded(distribution)
    # A removed module's bytecode is of no consequence, and each interpreter writes its own.
    listed = [each for each in files if each.path.suffix != ".pyc"]
    missing = [each for each in listed if not each.path.is_file()]
    changed = [each for each in listed if each not in missing and _has_changed(each)]
    known = {each.path.resolve() for each in files}
    strange = (
        []
        if _editable_tree(distribution)
        else [each for each in home.rglob("*.py") if each.resolve() not in known]
    )
    for what, which in (("missing", missing), ("changed", changed), ("of another installation", strange)):
        if which:
            named = ", ".join(sorted(map(str, which))[:_SHOWN]) + (", ..." if len(which) > _SHOWN else "")
            yield Finding(
                "installation",
                Status.FAIL,
                f"{len(which)} of its files {'are' if len(which) > 1 else 'is'} {what}: {named}",
                f"uninstall rollgym, delete {home} if it is left, and install it again"
                if which is strange
                else "uninstall rollgym, and install it again",
            )
    if not (missing or changed or strange):
        yield Finding("installation", Status.PASS, f"{_place(distribution)}, {len(listed)} files")


def _recorded(distribution: Distribution) -> list[_RecordedFile]:
    """The installer's list. `Distribution.files` leaves out what is missing since Python 3.12."""
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    named = ([*row, ""][:2] for row in rows if row)
    return [_RecordedFile(name, Path(str(distribution.locate_file(name))), digest) for name, digest in named]


def _has_changed(file: _RecordedFile) -> bool:
    mode, _, expected = file.digest.partition("=")
    if mode not in hashlib.algorithms_guaranteed:
        return False
    with file.path.open("rb") as content:
        digest = hashlib.file_digest(content, partial(hashlib.new, mode)).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
