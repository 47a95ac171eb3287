"""The ids of sessions at nodes: what is written into them is read from them, and nobody else's passes."""

import re
import secrets
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.env_server.gateway.session_names import parse_session_name, session_name
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
