"""Updates of all servers of a pool, some of which go or come back meanwhile."""

import asyncio

import pytest

from tests.support.pool_servers import Server, Sleeper, pool_of, until
from tests.support.tiny_models import WeightsOf


class Slow(Server):
    """A server whose updates do not end as long as `stands` is set."""

    def __init__(self, model):
        super().__init__(model)
        self.stands = False

    async def sync(self, source, version):
        if self.stands:
            self.syncs.append(version)
            await self._connected(asyncio.Event().wait())
        await super().sync(source, version)


class SlowSleeper(Sleeper, Slow):
    """A server that sleeps between updates, and whose updates do not end as long as `stands` is set."""


async def test_a_server_that_was_too_late_in_its_sleep_is_woken_by_the_next_update(model):
    servers = {"a": SlowSleeper(model), "b": SlowSleeper(model)}
    async with asyncio.timeout(60), pool_of(servers, update_timeout_s=0.3) as pool:
        await pool.sync(WeightsOf(model), 1)
        await pool.sleep(keep_weights=False)
        servers["a"].stands = True
        await pool.sync(WeightsOf(model), 2)
        assert pool.serving == ["b"]
        servers["a"].stands = False
        looks = servers["b"].looks
        await until(lambda: servers["b"].looks > looks + 5)
        await pool.sync(WeightsOf(model), 3)
        assert pool.serving == ["a", "b"]
    slept = ["connect", "sync 1", "sleep", "weights", "sync 2"]
    assert servers["a"].steps == [*slept, "weights", "sync 3", "kv_cache"]


@pytest.fixture
def slow(model):
    return {"a": Slow(model), "b": Slow(model)}


async def test_an_update_ends_with_the_server_that_came_back_while_the_others_were_lost(slow, model):
    async with asyncio.timeout(60), pool_of(slow, patience_s=5.0) as pool:
        await pool.sync(WeightsOf(model), 1)
        slow["b"].unplug()
        await until(lambda: pool.serving == ["a"])
        slow["a"].stands = True
        updating = asyncio.ensure_future(pool.sync(WeightsOf(model), 2))
        await until(lambda: slow["a"].syncs == [1, 2])
        slow["b"].plug()
        await until(lambda: pool.serving == ["a", "b"])
        assert slow["b"].version == 2
        slow["a"].unplug()
        await updating
        assert pool.serving == ["b"]


async def test_patience_begins_when_the_last_server_is_lost_and_not_with_the_update(slow, model):
    async with asyncio.timeout(60), pool_of(slow, patience_s=2.0) as pool:
        await pool.sync(WeightsOf(model), 1)
        slow["b"].unplug()
        await until(lambda: pool.serving == ["a"])
        slow["a"].stands = True
        updating = asyncio.ensure_future(pool.sync(WeightsOf(model), 2))
        await asyncio.wait([updating], timeout=2.5)
        slow["a"].stands = False
        slow["a"].unplug()
        await until(lambda: not pool.serving)
        slow["a"].plug()
        await updating
        assert (pool.serving, slow["a"].version) == (["a"], 2)
