"""Where sessions at nodes are: ids say it, which nobody else can make, and the file of where sessions went on."""

import re
import resource
import secrets
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.env_server.gateway import moves as moves_module
from rollgym.env_server.gateway.moves import Moves, parse_session_name, session_name
from rollgym.env_server.gateway.upstream.node import node_key

KEYS = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32))
UPSTREAM_IDS = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=90)
NODES = st.builds(node_key, st.text(), st.text())


@given(KEYS, st.booleans(), NODES, UPSTREAM_IDS)
def test_an_id_says_what_was_written_into_it(key: bytes, lingers: bool, node: str, upstream_id: str) -> None:
    session_id = session_name(key, lingers, node, upstream_id)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", session_id)
    name = parse_session_name(session_id)
    assert name is not None
    assert (name.lingers, name.node, name.upstream_id) == (lingers, node, upstream_id)
    assert name.is_of(key)


@given(KEYS, KEYS, NODES, UPSTREAM_IDS, st.data())
def test_no_other_owner_and_no_other_id_passes(
    key: bytes, other: bytes, node: str, upstream_id: str, data: st.DataObject
) -> None:
    session_id = session_name(key, True, node, upstream_id)
    name = parse_session_name(session_id)
    assert name is not None
    assert name.is_of(other) == (other == key)
    place = data.draw(st.integers(0, len(session_id) - 1))
    letter = data.draw(st.sampled_from("abs0.7_h"))
    changed = session_id[:place] + letter + session_id[place + 1 :]
    forged = parse_session_name(changed)
    assert changed == session_id or forged is None or not forged.is_of(key)


def test_ids_of_a_servers_own_sessions_are_none_of_these() -> None:
    assert parse_session_name(f"0.{secrets.token_hex(16)}") is None
    assert parse_session_name("x" * 200) is None


def test_three_gateways_may_stand_before_each_other_and_not_four() -> None:
    session_id = f"0.{secrets.token_hex(16)}"
    for url in ("http://a", "http://b", "http://c"):
        session_id = session_name(b"", True, node_key(url, "anyone"), session_id)
    with pytest.raises(ValueError, match="138 characters"):
        session_name(b"", True, node_key("http://d", "anyone"), session_id)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond so many bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def read(path: Path | None) -> Iterator[Moves]:
    """What a gateway that is started now knows."""
    moves = Moves(path)
    try:
        yield moves
    finally:
        moves.close()


def begun(path: Path) -> Moves:
    """The moves of a gateway that was started before with this file."""
    Moves(path).close()
    moves = Moves(path)
    assert moves.are_known
    moves.moved("one", "node", "1")
    return moves


def test_what_cannot_be_read_costs_one_move_and_no_start(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    begun(path).close()
    with path.open("ab") as file:
        for line in (
            b"\x00\xff",
            b"5",
            b'["two"]',
            b'["three", 7]',
            b'[["four"], null]',
            b'["five", [1, 2]]',
        ):
            file.write(line + b"\n")
    with read(path) as moves:
        assert not moves.are_known, "a line that cannot be read may have been a move"
        moves.moved("six", "node", "6")
    with read(path) as again:
        assert [again.place(each) for each in ("one", "three", "six")] == [("node", "1"), None, ("node", "6")]
        assert not again.are_known


def test_a_file_that_was_not_there_knows_nothing_of_the_gateways_before(tmp_path: Path) -> None:
    for are_known in (False, True):
        with read(tmp_path / "moves.jsonl") as moves:
            assert moves.are_known == are_known
    with read(None) as moves:
        assert not moves.are_known


@pytest.mark.parametrize("more", [0, 5], ids=["nothing of a line", "a part of a line"])
def test_moves_that_a_full_disk_did_not_take_are_known_to_be_missing(tmp_path: Path, more: int) -> None:
    path = tmp_path / "moves.jsonl"
    moves = begun(path)
    with room_for(path.stat().st_size + more):
        moves.moved("two", "node", "2")
        assert moves.place("two") == ("node", "2")
    # It is killed, and another one takes its place.
    with read(path) as second:
        assert (second.place("one"), second.place("two")) == (("node", "1"), None)
        assert not second.are_known
        second.moved("three", "node", "3")
    with read(path) as third:
        assert third.place("three") == ("node", "3")
        assert not third.are_known, "what was missing is missing still"


def test_a_part_of_a_line_is_no_end_of_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    begun(path).close()
    path.write_bytes(path.read_bytes()[:-3])
    with read(path) as moves:
        assert not moves.are_known


@pytest.mark.parametrize("way", ["at the end", "at a later move"])
def test_what_is_missing_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(moves_module, "_RETRY_S", 0.0)
    path = tmp_path / "moves.jsonl"
    moves = begun(path)
    with room_for(path.stat().st_size):
        moves.moved("two", "node", "2")
        moves.moved("three", "node", "3")
        moves.ended("one")
    if way == "at the end":
        moves.close()
    else:
        moves.moved("four", "node", "4")
    with read(path) as again:
        assert again.are_known
        found = [again.place(each) for each in ("one", "two", "three")]
        assert found == [None, ("node", "2"), ("node", "3")]
        assert (again.place("four") is not None) == (way == "at a later move")
