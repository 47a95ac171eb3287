"""The journal of one session: digests, episodes and their bounds."""

import tracemalloc
from typing import Any

import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.protocol.episode import step_digest
from rollgym.env_server.sessions.journal import EndedStep, Journal
from tests.support.journals import COMMON, OPTIONS, PLAIN, SEED, STEP, TEXT


@COMMON
@given(
    seed=SEED,
    options=OPTIONS,
    first=PLAIN,
    steps=st.lists(STEP, max_size=70),
    looks=st.sets(st.integers(0, 70)),
)
def test_digests_are_those_of_the_steps(
    seed: int, options: Any, first: Any, steps: list[Any], looks: set[int]
) -> None:
    journal = Journal("Env", "1", {"a": 1})
    journal.begin(seed, options, first)
    expected = []
    for number, (action, *outcome) in enumerate(steps):
        journal.record(action, *outcome)
        expected.append(step_digest(*outcome))
        if number in looks:
            assert journal.digests == expected
            assert journal.last_digest().hex() == expected[-1]
        assert journal.ended == tuple(outcome[2:])
    assert journal.reset_digest == step_digest(first, 0.0, False, False)
    assert journal.packed_digests().hex() == "".join(expected)
    portable = journal.portable(4)
    assert (portable.episode, portable.seed, portable.options) == (4, seed, options)
    assert portable.digests == expected
    assert portable.actions == [step[0] for step in steps]
    again = Journal.from_portable(portable)
    assert again.portable(4) == portable
    # It goes on, and what it was made from does not.
    again.record("on", "", 0.0, False, False)
    again.reseed(3)
    assert (again.steps, journal.steps, again.reseeds) == (len(steps) + 1, len(steps), [(len(steps) + 1, 3)])
    assert portable.actions == journal.actions


@pytest.mark.parametrize("length", [20, 300, 500, 4096])
@pytest.mark.parametrize("steps", [7, 8, 30])
def test_observations_are_not_kept_in_number(length: int, steps: int) -> None:
    journal = Journal("Env-v0", "1", {})
    journal.begin(1, None, "")
    tracemalloc.start()
    try:
        for number in range(steps):
            journal.record("a", str(number).rjust(length), 0.0, False, False)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 6 * 1024


def test_a_new_episode_leaves_nothing_of_the_old_one() -> None:
    journal = Journal("Env", "1", {})
    assert (journal.seed, journal.reset_digest, journal.digests, journal.portable(0).seed) == (
        None,
        None,
        [],
        None,
    )
    before = EndedStep(0, 3, "a", "b", 1.0, True, False, {})
    journal.begin(1, {"x": 1}, "a", before=before, request_id="r")
    journal.record("go", "there", 1.0, True, False)
    journal.reseed(8)
    journal.begin(2, None, "b")
    assert (journal.steps, journal.digests, journal.reseeds, journal.ended) == (0, [], [], (False, False))
    assert (journal.before, journal.request_id, journal.pending_outcome) == (None, None, None)
    assert (journal.seed, journal.options) == (2, None)


def test_digests_and_actions_have_to_fit() -> None:
    journal = Journal("Env", "1", {})
    with pytest.raises(ValueError, match="1 digests came for 2 actions"):
        journal.resume(1, None, "0" * 16, ["a", "b"], bytes(8), [])
    assert journal.seed is None
    journal.resume(1, None, "0" * 16, ["a", "b"], bytes(16), [(1, 2)])
    journal.recall("c", b"\1" * 8, (False, True))
    assert (journal.steps, journal.digests[2], journal.ended) == (3, "01" * 8, (False, True))


@given(
    kwargs=st.dictionaries(TEXT, PLAIN, max_size=2),
    options=OPTIONS,
    actions=st.lists(PLAIN | st.text(max_size=40) | st.lists(st.sampled_from([0.5, 1.0, -2.0])), max_size=20),
    reseeds=st.integers(0, 3),
)
def test_an_episode_is_no_longer_than_its_journal_says(
    kwargs: dict[str, Any], options: dict[str, Any] | None, actions: list[Any], reseeds: int
) -> None:
    journal = Journal("env", "1", kwargs)
    journal.begin(2**53 - 1, options, "seen")
    empty = Journal("env", "1", {})
    empty.begin(2**53 - 1, None, "seen")
    for number, action in enumerate(actions):
        journal.record(action, "seen", 0.0, False, False)
        if number % 7 == 3:
            # Measuring in between changes nothing.
            assert journal.size <= journal.most
    for _ in range(reseeds):
        journal.reseed(2**53 - 1)
    most = journal.most
    assert journal.size <= most
    again = Journal.from_portable(journal.portable(0))
    assert (again.size, again.size_with("a")) == (journal.size, journal.size_with("a"))
    for dumps in (orjson.dumps, msgpack.packb):
        whole, envelope = (len(dumps(each.portable(0).model_dump())) for each in (journal, empty))
        # The heads of long lists are not counted in MessagePack.
        assert whole - envelope <= journal.size + 16
