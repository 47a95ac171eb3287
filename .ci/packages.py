"""What `.ci/wheel` has built: the sdist is the tree, and the wheel is the same from both.

Usage: packages.py FOLDER, with `dist/` and `from_tree/`, and `tracked`, a list of the tree's files.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

MADE = {"PKG-INFO", "setup.cfg"}
# What lies at the top of the tree and in the package of the wheel.
FLOORS = ("clients", "console", "env_server", "envs", "examples", "integrations", "sandbox", "trainer")


def main(folder: Path) -> None:
    tracked = set((folder / "tracked").read_text().split())
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    (from_tree,) = (folder / "from_tree").glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = {each.name.partition("/")[2]: each for each in archive if not each.isdir()}
        tree = {name for name in packed if not name.startswith("rollgym.egg-info/")} - MADE
        same("files of the sdist", tree, tracked)
        for name, member in packed.items():
            if member.issym():
                assert any(each.startswith(f"{member.linkname[3:]}/") for each in packed), (
                    f"{name} leads nowhere"
                )
        assert "\r" not in "".join(packed)
    content = contents(wheel)
    same("files of the wheels from sdist and tree", set(content), set(contents(from_tree)))
    assert content == contents(from_tree), "the wheels from sdist and tree differ"
    modules = {name for name in content if ".dist-info/" not in name}
    floors = {f"rollgym/{name}" for name in tracked if name.startswith(tuple(f"{each}/" for each in FLOORS))}
    own = {name for name in tracked if name.startswith("rollgym/")} - {f"rollgym/{each}" for each in FLOORS}
    same("modules and assets of the wheel", modules, floors | own)
    (metadata,) = (value.decode() for name, value in content.items() if name.endswith(".dist-info/METADATA"))
    relative = re.findall(
        r"\]\((?!https?://|#|mailto:)[^)]*\)|(?:src|href)=\"(?!https?://|#)[^\"]*\"", metadata
    )
    assert not relative, f"the README of the index has relative links: {relative}"
    print(f"the sdist has {len(packed)} files, the wheel {len(content)}, the same from sdist and tree")


def contents(wheel: Path) -> dict[str, bytes]:
    """What a wheel holds, by name. RECORD follows from the rest."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def same(what: str, found: set[str], expected: set[str]) -> None:
    missing, more = sorted(expected - found), sorted(found - expected)
    assert not (missing or more), f"{what}: missing {missing[:9]}, beside them {more[:9]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
