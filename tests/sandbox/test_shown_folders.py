"""What a sandbox is told to show is shown wherever it lies on the host: in `/tmp`, in a home, under odd names."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.sandbox.core.base import Outcome, Program, Sandbox, SandboxUnavailableError
from rollgym.sandbox.selection import open_sandbox
from rollgym.sandbox.supervisor.rootfs import _staging

READS = """
import sys
for path in sys.argv[1:]:
    print(open(path + "/it").read())
    try:
        open(path + "/more", "w")
    except OSError as error:
        print(error.strerror)
open("/tmp/own", "w").write("mine")
print(open("/tmp/own").read())
"""


def opened(kind: str, shown: list[str]) -> Sandbox:
    try:
        return open_sandbox(kind, minimum_level="namespaces", read_only=shown)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """One in each place that a sandbox puts something of its own over, and one with a name that needs care."""
    made = []
    for parent in ("/tmp", "/var/tmp", "/mnt", "/srv"):
        if os.access(parent, os.W_OK):
            made.append(Path(tempfile.mkdtemp(prefix="with spaces füße ", dir=parent)))
            made[-1].chmod(0o755)
            (made[-1] / "it").write_text(parent)
    yield made
    for folder in made:
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["namespaces", "bubblewrap"])
def test_folders_are_shown_wherever_they_lie(kind: str, folders: list[Path]) -> None:
    shown = [str(folder) for folder in folders]
    sandbox = opened(kind, shown)
    try:
        for _ in range(2):  # and again
            result = sandbox.run(Program("python", READS, tuple(shown)))
            assert result.outcome is Outcome.OK, result.stderr
            lines = result.stdout.decode().splitlines()
            assert lines[0::2][: len(shown)] == [str(folder.parent) for folder in folders]
            assert set(lines[1::2][: len(shown)]) == {"Read-only file system"}
            assert lines[-1] == "mine"
    finally:
        sandbox.close()
    assert [sorted(os.listdir(folder)) for folder in folders] == [["it"]] * len(folders)


def test_the_new_root_is_put_together_where_nothing_is_shown(tmp_path: Path) -> None:
    assert _staging([]) == "/tmp"
    assert _staging(["/opt/python", "/tmp/clone/.venv"]) not in ("/tmp", "/opt")
    assert _staging(["/tmpfoo"]) == "/tmp"
    (tmp_path / "link").symlink_to("/tmp")
    assert _staging([str(tmp_path / "link")]) != "/tmp"
    with pytest.raises(OSError, match="show less"):
        _staging([*("/tmp/a", "/mnt/a", "/media/a", "/srv/a", "/opt/a", "/var/tmp/a", "/run/a", "/boot/a")])
