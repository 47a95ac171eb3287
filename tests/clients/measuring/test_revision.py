"""Measurements say which commit they are of, or that it is unknown."""

import re
import subprocess
from pathlib import Path

import pytest

from rollgym.clients.measuring.revision import revision

ROOT = Path(__file__).parents[3]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    done = subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_has_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert revision(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    assert revision(tmp_path).startswith(revision(tmp_path, short=True))
    copy = tmp_path / "copy of rollgym"
    copy.mkdir()
    assert revision(copy) == "unknown"


def test_what_has_no_history_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision(tmp_path) == revision(tmp_path / "not there") == "unknown"
    git(tmp_path, "init", "--quiet")
    assert revision(tmp_path) == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision(ROOT) == "unknown"


def test_benchmarks_ask_nothing_else_for_the_commit() -> None:
    asking = [
        path
        for folder in ("benchmarks", "peers")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"rev-parse", path.read_text())
    ]
    assert asking == []
