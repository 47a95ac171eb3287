"""A file that names inference servers: what is read of it, and what is kept while it cannot be read."""

import os
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.inference import read_servers
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.server_pool.members import FileRoster

A, B = "http://a:1", "http://b:2"


def test_a_line_names_a_server(tmp_path):
    path = tmp_path / "servers"
    path.write_text(f"# those of today\n\n  {A}/ \r\n{B}")
    assert read_servers(path) == [A, B]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*servers: No such file"),
        (b"\xff\xfe", "cannot read .*servers: it is no text"),
        (b"", "names no server: write one address a line"),
        (b"# none yet\n", "names no server"),
        (b"http://a:1\nb:2\n", "line 2: 'b:2' is not the address of a server"),
        (b"http://a b\n", "line 1: 'http://a b' is not the address of a server"),
        (b"http://a:1/v1\n", "line 1: .*ends with /v1"),
        (b"http://a:1\nhttp://a:1/\n", "line 2 names http://a:1 twice"),
        (b"#" * (2**20 + 1), "larger than a list of servers can be"),
    ],
)
async def test_a_file_that_cannot_be_used_ends_a_start_and_changes_nothing_later(tmp_path, content, message):
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    said = []
    roster = FileRoster(path, said.append)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"inference.urls_file: .*{message}"):
        FileRoster(path, said.append)
    assert said == []
    for _ in range(3):
        assert await roster.names() == [A, B]
    (line,) = said
    assert line.endswith("; the 2 servers that it named last stay")
    path.write_text(B)
    assert await roster.names() == [B]
    assert await roster.names() == [B]
    assert said[1:] == [f"inference.urls_file: {path} can be read again"]


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    """Nobody may ever write into a pipe."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(
            ConfigError, match=f"inference.urls_file: cannot read {path}: it is no regular file"
        ):
            read_servers(path)


def test_a_path_that_is_none_is_an_error_of_the_settings():
    with pytest.raises(ConfigError, match=r"inference\.urls_file: cannot read .*: embedded null"):
        read_servers(Path("servers\0"))


def test_a_long_file_is_read_in_time_linear_in_its_length(tmp_path):
    path = tmp_path / "servers"
    addresses = [f"http://{number:x}" for number in range(80_000)]
    path.write_text("\n".join(addresses))
    assert read_servers(path) == addresses


def test_a_dry_run_looks_for_the_file(tmp_path, capsys):
    path = tmp_path / "servers"
    words = ["--dry-run", "tasks=[{env_id: FrozenLake-v0}]", f"inference={{kind: vllm, urls_file: {path}}}"]
    assert main(words) == 2
    assert f"inference.urls_file: cannot read {path}" in capsys.readouterr().err
    path.write_text(A)
    assert main(words) == 0
