"""When garbage is collected: not while the loop is busy, and not later than the bound."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from rollgym.env_server.process.garbage import IdleCollections


class Ring:
    """Something that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leaves the collector as it was."""
    thresholds = gc.get_threshold()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    assert gc.get_threshold() == thresholds


class Busy:
    """A thread that runs all the time, or not at all."""

    def __init__(self) -> None:
        self.share = 1.0
        self._seconds = 0.0
        self._looked_at = 0.0

    def __call__(self) -> float:
        now = asyncio.get_running_loop().time()
        self._seconds += self.share * (now - self._looked_at)
        self._looked_at = now
        return self._seconds


def old_garbage(collections: int) -> "weakref.ref[Ring]":
    """Garbage of the oldest generation, behind so many collections of the middle one."""
    ring = Ring()
    gc.collect()
    gone = weakref.ref(ring)
    del ring
    for _ in range(collections):
        gc.collect(1)
    return gone


async def test_old_garbage_waits_until_the_loop_has_nothing_to_do() -> None:
    busy = Busy()
    with IdleCollections(busy):
        gone = old_garbage(10)
        await asyncio.sleep(0.5)
        assert gone() is not None
        busy.share = 0.0
        async with asyncio.timeout(30):
            while gone() is not None:
                await asyncio.sleep(0.01)


async def test_a_loop_that_is_idle_collects_no_more_often_than_python_does() -> None:
    busy = Busy()
    busy.share = 0.0
    with IdleCollections(busy):
        gone = old_garbage(9)
        await asyncio.sleep(0.5)
        assert gone() is not None


async def test_a_loop_that_is_never_idle_leaves_no_garbage_for_ever() -> None:
    with IdleCollections(Busy()):
        gone = old_garbage(51)
        gc.enable()
        kept: list[list[int]] = []
        # Who looks often keeps it alive: Python 3.12 and later collect between two instructions, also behind a look.
        for _ in range(1_000):
            kept += [[] for _ in range(1_000)]
            if gone() is None:
                break
        assert gone() is None


async def test_what_start_up_has_made_is_not_looked_at_again() -> None:
    ring = Ring()
    with IdleCollections():
        later = Ring()
        looked_at = {id(each) for each in gc.get_objects()}
    assert id(later) in looked_at
    assert id(ring) not in looked_at
