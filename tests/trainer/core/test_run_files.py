"""What a command writes is its own while it writes it."""

from pathlib import Path

import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import output_lock

NULL = Path("/dev/null")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_command_at_a_time_holds_what_it_writes(tmp_path, kind):
    path = tmp_path / "written"
    if kind == "folder":
        path.mkdir()
    with output_lock(path):
        with (
            pytest.raises(
                ConfigError, match=r"--output .*/written is in use by another process: wait for it"
            ),
            output_lock(path),
        ):
            pass
        with output_lock(tmp_path / "other"):
            pass
    with output_lock(path):
        pass
    assert {each.name for each in tmp_path.iterdir()} == {"written", "other"}, "nothing is left beside it"


def test_what_is_no_file_is_nobodys():
    with output_lock(NULL), output_lock(NULL):
        pass
