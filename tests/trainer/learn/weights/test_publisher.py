"""Weights that are read once for all servers, whatever the pace of each."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.learn.weights.publisher import SharedReading

WEIGHTS = [(f"w{number}", torch.full((4,), float(number))) for number in range(12)]
SIZE = 16
"""Bytes of each."""


class Passes:
    """Counts the passes, and what was read in all of them."""

    def __init__(self):
        self.begun = 0
        self.read = 0

    def __call__(self):
        self.begun += 1
        for named in WEIGHTS:
            self.read += 1
            yield named


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 14))
def test_each_reader_gets_all_in_order_whatever_the_others_do(turns, held):
    passes = Passes()
    shared = SharedReading(passes, limit=held * SIZE)
    readers = [shared.reader() for _ in range(3)]
    got = [[], [], []]
    for who in turns:
        got[who] += [named for named in [next(readers[who], None)] if named is not None]
        assert len(shared._held) <= held
    for who, reader in enumerate(readers):
        got[who] += list(reader)
        assert [name for name, _ in got[who]] == [name for name, _ in WEIGHTS]
    if held >= len(WEIGHTS):
        assert (passes.begun, passes.read) == (1, len(WEIGHTS))


def test_readers_at_one_pace_share_a_pass_though_little_is_held():
    passes = Passes()
    shared = SharedReading(passes, limit=2 * SIZE)
    assert len(list(zip(*(shared.reader() for _ in range(5)), strict=True))) == len(WEIGHTS)
    assert passes.begun == 1


def test_who_falls_behind_reads_alone_and_nobody_waits():
    passes = Passes()
    shared = SharedReading(passes, limit=2 * SIZE)
    fast, slow = shared.reader(), shared.reader()
    assert next(slow)[0] == "w0"
    assert len(list(fast)) == len(WEIGHTS)
    assert [name for name, _ in slow] == [name for name, _ in WEIGHTS[1:]]
    assert passes.begun == 2


def test_threads_read_beside_each_other():
    passes = Passes()
    shared = SharedReading(passes)
    found = {}

    def read(number):
        found[number] = [name for name, _ in shared.reader()]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(found[number] == [name for name, _ in WEIGHTS] for number in range(8))
    assert passes.begun == 1


def test_a_pass_that_fails_fails_for_all_who_read():
    def broken():
        yield WEIGHTS[0]
        raise RuntimeError("a rank is gone")

    shared = SharedReading(broken)
    for reader in [shared.reader() for _ in range(2)]:
        assert next(reader)[0] == "w0"
        with pytest.raises(RuntimeError, match="a rank is gone"):
            next(reader)
