"""A new folder is written whole or not at all, and never over what is there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollgym.clients.scaffold.folder import FolderError, write_folder

FILES = {"README.md": "read me\n", "src/lake/map.txt": "SFFG ä\n"}


def read(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["lake", "mein See ä", "a/b/c", "-x", "'$(id)'\n"])
def test_a_folder_of_any_name_holds_the_files(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / name, FILES)
    assert read(tmp_path / name) == FILES
    # The umask decides who may read it, as for any folder that a user makes.
    other = tmp_path / "other"
    other.mkdir()
    assert (tmp_path / name).stat().st_mode == other.stat().st_mode


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(FolderError, match=f"{name} exists already, and nothing is overwritten"):
            write_folder(tmp_path / name, FILES)
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]


@pytest.mark.parametrize("wrong", ["a\0b", "README.md/inside"])
def test_a_folder_that_cannot_be_finished_is_not_there(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(FolderError, match="cannot write"):
        write_folder(tmp_path / "lake", {**FILES, wrong: ""})
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_system_refuses_is_an_error_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file/lake", "x" * 300, "a\0b"):
        with pytest.raises(FolderError, match="cannot write"):
            write_folder(tmp_path / name, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_many_who_write_one_folder_one_succeeds(tmp_path: Path) -> None:
    def attempt(number: int) -> int | None:
        try:
            write_folder(tmp_path / "lake", {**FILES, "winner": str(number)})
        except FolderError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        won = [number for number in pool.map(attempt, range(32)) if number is not None]
    assert len(won) == 1
    assert read(tmp_path / "lake") == {**FILES, "winner": str(won[0])}
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]
