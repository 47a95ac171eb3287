"""Requests go where their past is cached, and no server is made to carry the others' load for it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.inference.server_pool.pool import Router

SERVERS = ("a", "b", "c", "d")
loads = st.dictionaries(st.sampled_from(SERVERS), st.integers(0, 10_000), min_size=1)
requests = st.tuples(st.sampled_from(["", "s1", "s2", "s3"]), st.lists(st.integers(0, 9), max_size=3))


@given(st.lists(st.tuples(requests, loads), max_size=40))
def test_only_servers_that_answer_are_chosen(asked):
    router = Router()
    for (session, prompt), answering in asked:
        assert router.choose(session, prompt, 10, answering) in answering


@given(st.lists(loads, min_size=1, max_size=40))
def test_a_session_stays_while_its_server_answers(seen):
    router, before = Router(), None
    for turn, answering in enumerate(seen):
        chosen = router.choose("session", [turn], 10, answering)
        if before in answering:
            assert chosen == before
        else:
            assert answering[chosen] == min(answering.values())
        before = chosen


def test_the_first_turns_of_a_group_go_to_one_server():
    router = Router()
    carried = dict.fromkeys(SERVERS, 0)
    for group in range(50):
        members = set()
        for member in range(8):
            chosen = router.choose(f"{group}-{member}", [group, 1, 2], 100, carried)
            carried[chosen] += 100
            members.add(chosen)
        assert len(members) == 1
    assert max(carried.values()) <= 1.2 * min(carried.values())


@given(st.integers(1, 500), st.integers(1, 64))
def test_one_prompt_for_all_does_not_burden_one_server(count, tokens):
    router = Router()
    carried = dict.fromkeys(SERVERS, 0)
    for number in range(count):
        carried[router.choose(f"s{number}", [1, 2, 3], tokens, carried)] += tokens
    assert max(carried.values()) <= 1.5 * min(carried.values()) + 17 * tokens


def test_what_was_not_seen_for_longest_is_forgotten():
    router = Router(remembered=2)
    first = router.choose("one", [1], 1, {"a": 0, "b": 1})
    for name in ("two", "three"):
        router.choose(name, [2], 1, {"a": 5, "b": 0})
    assert first == "a"
    assert router.choose("one", [3], 1, {"a": 5, "b": 0}) == "b"


def test_sessions_of_a_lost_server_spread_over_the_others():
    router = Router()
    carried = {"a": 0, "b": 10_000, "c": 10_000}
    for number in range(30):
        assert router.choose(f"s{number}", [number], 10, carried) == "a"
    left = {"b": 0, "c": 0}
    where = Counter()
    for number in range(30):
        chosen = router.choose(f"s{number}", [number, 1], 10, left)
        left[chosen] += 10
        where[chosen] += 1
    assert where == {"b": 15, "c": 15}
