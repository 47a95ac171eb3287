"""Servers of a pool that go, come back, are added and take weights: what they get, and who is told."""

import asyncio

import pytest

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    MalformedReplyError,
    NoServerError,
    SharedServerError,
    WeightsReleasedError,
    WeightUpdateError,
    WrongWeightsError,
)
from rollgym.trainer.inference.server_pool.members import Member, ServerRoster
from rollgym.trainer.inference.servers.launch import RestartingServers
from tests.support.clock import clock, on_a_clock
from tests.support.pool_servers import Server, Sleeper, pool_of, request, until
from tests.support.tiny_models import WeightsOf, sharp_model


async def test_a_server_that_answers_nothing_but_rubbish_is_brought_up_to_date(servers, model):
    async with pool_of(servers) as pool:
        await pool.sync(WeightsOf(model), 1)
        servers["a"].answers = [MalformedReplyError("a page")] * 3
        for _ in range(3):
            await pool.generate_together([request(number) for number in range(4)])
        await until(lambda: servers["a"].syncs == [1, 1])
        await until(lambda: len(pool.serving) == 2)


async def test_rubbish_in_an_update_costs_the_server_and_not_the_run(servers, model):
    async def check(name, client):
        if name == "a" and len(servers["a"].syncs) < 5:
            raise MalformedReplyError("a page")

    async with pool_of(servers, check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        assert pool.serving == ["b"]
        await until(lambda: len(pool.serving) == 2)
    assert len(servers["a"].syncs) == 5


async def test_two_runs_that_take_a_server_from_each_other_are_told(servers, model):
    server = {"a": servers["a"]}
    async with pool_of(server) as pool:
        await pool.sync(WeightsOf(model), 1)
        for _ in range(4):
            servers["a"].answers = [
                ForeignWeightsError("a serves weights called 'x-1': somebody else updates it")
            ]
            assert (await pool.generate(request(0))).token_ids
        servers["a"].answers = [
            ForeignWeightsError("a serves weights called 'x-1': somebody else updates it")
        ]
        with pytest.raises(SharedServerError, match=r"'x-1'.*5 times: give each run"):
            await pool.generate(request(0))


async def test_a_server_that_is_back_gets_the_current_weights_first(pool, servers):
    newer = sharp_model(1)
    servers["a"].unplug()
    await pool.sync(WeightsOf(newer), 2)
    before = len(servers["a"].seen)
    servers["a"].plug()
    await until(lambda: "a" in pool.serving)
    assert servers["a"].version == 2
    replies = await asyncio.gather(*(pool.generate(request(number)) for number in range(8)))
    assert len(servers["a"].seen) > before
    assert {version for reply in replies for version in reply.policy_versions} == {2}


async def test_patience_does_not_run_out_while_a_server_is_started_again(servers, model):
    starts = RestartingServers()
    async with pool_of(servers, patience_s=0.1, starts=starts) as pool:
        await pool.sync(WeightsOf(model), 1)
        for server in servers.values():
            server.unplug()
        starts.begin("a")
        asked = asyncio.ensure_future(pool.generate(request(0)))
        synced = asyncio.ensure_future(pool.sync(WeightsOf(model), 2))
        done, _ = await asyncio.wait([asked, synced], timeout=0.5)
        assert not done
        servers["a"].plug()
        await asyncio.wait_for(synced, 20)
        assert len((await asyncio.wait_for(asked, 20)).token_ids) == 6
        servers["a"].unplug()
        starts.end("a")
        with pytest.raises(NoServerError, match="refused"):
            await pool.generate(request(1))


async def test_a_server_that_cannot_be_verified_when_it_is_back_waits_for_the_next_weights(servers, model):
    """Its weights are not sent again and again meanwhile: training has gone on, and nothing would change."""
    check = Suspicious("a", 0)
    async with pool_of(servers, check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        servers["a"].unplug()
        await pool.generate_together([request(number) for number in range(6)])
        await until(lambda: pool.serving == ["b"])
        check.times = check.asked + 2  # both attempts of bringing it back
        servers["a"].plug()
        await until(lambda: check.asked == check.times)
        looks = servers["b"].looks
        await until(lambda: servers["b"].looks > looks + 3)
        assert servers["a"].syncs == [1, 1, 1]
        await pool.sync(WeightsOf(sharp_model(1)), 2)
        assert pool.serving == ["a", "b"]


async def test_a_sync_goes_on_without_the_server_that_is_lost_in_it(pool, servers):
    servers["b"].unplug()
    await pool.sync(WeightsOf(sharp_model(1)), 2)
    assert pool.version == 2
    assert pool.serving == ["a"]


class LostInItsUpdate(Server):
    """A server whose replies break off while it takes its second weights, which it takes all the same."""

    def __init__(self, model):
        super().__init__(model)
        self.updating = asyncio.Event()
        self.broken_off = asyncio.Event()

    async def extend(self, reply):
        if len(self.syncs) == 1:
            await self.updating.wait()
            self.broken_off.set()
            raise ConnectionError("connection reset")
        return await super().extend(reply)

    async def sync(self, source, version):
        await super().sync(source, version)
        if version == 2:
            self.updating.set()
            await self.broken_off.wait()


async def test_a_server_that_loses_a_request_in_its_update_gets_the_next_weights_too(model):
    server = LostInItsUpdate(model)
    async with asyncio.timeout(60), pool_of({"a": server}) as pool:
        await pool.sync(WeightsOf(model), 1)
        asked = asyncio.ensure_future(pool.generate(request(0)))
        await asyncio.sleep(0)
        await pool.sync(WeightsOf(sharp_model(1)), 2)
        assert (await asked).policy_versions == [2] * 6
        await pool.sync(WeightsOf(sharp_model(2)), 3)
        assert server.syncs == [1, 2, 3]
        assert (await pool.generate(request(1))).policy_versions == [3] * 6


async def test_what_comes_back_in_a_pause_is_paused(pool, servers):
    servers["a"].unplug()
    await until(lambda: pool.serving == ["b"])
    await pool.pause("keep")
    servers["a"].plug()
    await until(lambda: len(pool.serving) == 2)
    asked = [asyncio.ensure_future(pool.generate(request(number))) for number in range(6)]
    await until(lambda: servers["a"].seen and servers["b"].seen)
    done, _ = await asyncio.wait(asked, timeout=0.1)
    assert not done
    await pool.resume()
    assert all(len(reply.token_ids) == 6 for reply in await asyncio.gather(*asked))


async def test_what_comes_back_in_a_pause_is_paused_before_it_serves(pool, servers):
    serving_at_pause = []
    server = servers["a"]
    pause = server.pause

    async def noted_pause(mode):
        serving_at_pause.append("a" in pool.serving)
        await pause(mode)

    server.unplug()
    await until(lambda: pool.serving == ["b"])
    await pool.pause("keep")
    server.pause = noted_pause
    server.plug()
    await until(lambda: len(pool.serving) == 2)
    assert serving_at_pause == [False]


async def test_what_comes_back_while_a_pause_ends_goes_on(pool, servers):
    resumed = asyncio.Event()
    server = servers["a"]
    pause = server.pause

    async def slow_pause(mode):
        await pause(mode)
        await resumed.wait()

    server.unplug()
    await until(lambda: pool.serving == ["b"])
    await pool.pause("keep")
    server.pause = slow_pause
    server.plug()
    await until(lambda: server.syncs == [1, 1])
    await pool.resume()
    resumed.set()
    await until(lambda: len(pool.serving) == 2)
    replies = await asyncio.gather(*(pool.generate(request(number)) for number in range(6)))
    assert all(len(reply.token_ids) == 6 for reply in replies)
    assert len(server.seen) > 0


class LateSleeper(Sleeper):
    """A server that goes to sleep and says so too late."""

    async def sleep(self, *, keep_weights):
        await super().sleep(keep_weights=keep_weights)
        raise TimeoutError("no answer for 5 s")


async def test_a_server_that_may_sleep_is_not_asked_before_its_next_weights(model):
    """A probe would generate on memory that it has given back."""
    sleeper, other = LateSleeper(model), LateSleeper(model)
    async with asyncio.timeout(60), pool_of({"a": sleeper, "b": other}) as pool:
        await pool.sync(WeightsOf(model), 1)
        await pool.sleep(keep_weights=True)
        assert pool.serving == []
        await asyncio.sleep(0.1)  # ten looks
        await pool.sync(WeightsOf(sharp_model(1)), 2)
        for server in (sleeper, other):
            assert server.steps == ["connect", "sync 1", "sleep", "weights", "sync 2", "kv_cache"]
        assert pool.serving == ["a", "b"]


async def test_a_server_that_is_gone_when_it_is_to_wake_is_met_again(model):
    """Who was started again is awake."""
    sleeper = LateSleeper(model)
    wakes = []

    async def wake(tags):
        wakes.append(tags)
        raise ConnectionError("connection refused")

    async with asyncio.timeout(60), pool_of({"a": sleeper}) as pool:
        await pool.sync(WeightsOf(model), 1)
        await pool.sleep(keep_weights=True)
        sleeper.wake = wake
        await pool.sync(WeightsOf(sharp_model(1)), 2)
        assert len(wakes) == 1
        assert sleeper.steps[:5] == ["connect", "sync 1", "sleep", "connect", "sync 2"]


class FailingRoster:
    """A roster that fails once in a way that nobody has thought of."""

    def __init__(self):
        self.broken = False

    async def names(self):
        if self.broken:
            self.broken = False
            raise ValueError("no such place")
        return ["a", "b"]


async def test_a_watch_that_ends_is_told_to_all_who_ask(servers, model):
    roster = FailingRoster()
    async with asyncio.timeout(60), pool_of(servers, roster=ServerRoster(roster.names, servers.get)) as pool:
        await pool.sync(WeightsOf(model), 1)
        for server in servers.values():
            server.unplug()
        await until(lambda: not pool.serving)
        asked = asyncio.ensure_future(pool.generate(request(0)))
        await asyncio.sleep(0)
        roster.broken = True
        with pytest.raises(RunError, match=r"looked after.*ValueError: no such place"):
            await asked
        with pytest.raises(RunError, match=r"looked after.*ValueError: no such place"):
            await pool.sync(WeightsOf(model), 2)


class Named:
    """Which of some servers a pool is to have, and what it says of them."""

    def __init__(self, servers, *names):
        self.servers = servers
        self.now = list(names)
        self.said = []

    async def names(self):
        return list(self.now)

    def pool(self, **options):
        servers = {name: self.servers[name] for name in self.now}
        return pool_of(
            servers, say=self.said.append, roster=ServerRoster(self.names, self.servers.get), **options
        )

    def says(self, text):
        return sum(text in line for line in self.said)


@pytest.mark.parametrize("fault", [WrongWeightsError, WeightUpdateError, RunError])
async def test_a_server_that_is_added_and_does_not_take_the_weights_is_gone_on_without(servers, model, fault):
    broken = asyncio.Event()
    broken.set()

    async def check(name, client):
        if name == "b" and broken.is_set():
            raise fault(f"b: the update to version {servers['b'].syncs[-1]} failed")

    named = Named(servers, "a")
    async with asyncio.timeout(60), named.pool(check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.says("b is not asked yet: b: the update"))
        for version in (2, 3):
            await pool.sync(WeightsOf(model), version)
            assert pool.serving == ["a"]
            assert servers["a"].version == version
        assert (await pool.generate(request(0))).policy_versions == [3] * 6
        broken.clear()
        await pool.sync(WeightsOf(model), 4)
        assert pool.serving == ["a", "b"]
        broken.set()
        with pytest.raises(fault, match="version 5"):  # it is one of them now
            await pool.sync(WeightsOf(model), 5)


async def test_a_server_that_is_added_and_does_not_take_the_weights_is_told_of_once(servers, model):
    async def check(name, client):
        if name == "b":
            raise WrongWeightsError(f"b has others than those of version {servers['b'].syncs[-1]}")

    named = Named(servers, "a")
    async with asyncio.timeout(60), named.pool(check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.says("b is not asked yet"))
        said = list(named.said)
        for version in (2, 3, 4):
            await pool.sync(WeightsOf(model), version)
        # Twice each, and twice more where a look came between the new version and its update.
        assert servers["b"].syncs == sorted(servers["b"].syncs)
        assert set(servers["b"].syncs) == {1, 2, 3, 4}
        assert named.said == said


async def test_an_address_that_is_added_and_where_nobody_answers_is_told_of_once(servers, model):
    servers["b"].unplug()
    named = Named(servers, "a")
    async with asyncio.timeout(60), named.pool() as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.says("b is not asked yet: connection refused"))
        looks = servers["a"].looks
        await until(lambda: servers["a"].looks > looks + 3)
        assert named.says("b is not asked yet") == 1
        servers["b"].plug()
        await until(lambda: pool.serving == ["a", "b"])
        assert named.says("b takes requests, with the weights of version 1") == 1


async def test_a_server_that_is_first_brought_up_by_an_update_is_told_of_and_is_new_no_more(servers, model):
    check = Suspicious("b", 2)  # both attempts of the first time
    named = Named(servers, "a")
    async with asyncio.timeout(60), named.pool(check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.says("b is not asked yet: b has others"))
        await pool.sync(WeightsOf(model), 2)
        assert pool.serving == ["a", "b"]
        assert named.says("b takes requests, with the weights of version 2") == 1
        servers["b"].unplug()
        await until(lambda: named.says("b is gone"))
        servers["b"].plug()
        await until(lambda: pool.serving == ["a", "b"])
        assert named.says("b is back, with the weights of version 2") == 1
        assert named.says("b takes requests") == 1


async def test_a_server_that_is_brought_back_by_an_update_is_told_of(servers, model):
    check = Suspicious("b", 0)
    named = Named(servers, "a", "b")
    async with asyncio.timeout(60), named.pool(check=check) as pool:
        await pool.sync(WeightsOf(model), 1)
        assert not named.said, "nobody was gone"
        servers["b"].unplug()
        await until(lambda: named.says("b is gone"))
        check.times = check.asked + 2
        servers["b"].plug()
        await until(lambda: check.asked == check.times)
        await pool.sync(WeightsOf(model), 2)
        await until(lambda: pool.serving == ["a", "b"])
        assert named.says("b is back, with the weights of version 2") == 1


class Endless(Server):
    """A server whose front end lives, and whose updates never end unless its client is closed."""

    def __init__(self, model):
        super().__init__(model)
        self.closed = asyncio.Event()

    async def sync(self, source, version):
        self.syncs.append(version)
        await self.closed.wait()
        raise WeightUpdateError("b: the update failed: the client was closed")

    async def close(self):
        self.closed.set()
        await super().close()


async def test_while_one_server_takes_its_weights_for_ever_the_others_are_looked_after(servers, model):
    named = Named(servers | {"b": Endless(model), "c": servers["b"]}, "a")
    async with asyncio.timeout(60), named.pool() as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.servers["b"].syncs)
        named.now.append("c")
        await until(lambda: pool.serving == ["a", "c"])
        servers["a"].unplug()
        await until(lambda: pool.serving == ["c"])
        servers["a"].plug()
        await until(lambda: pool.serving == ["a", "c"])
        assert named.servers["b"].syncs == [1]


async def test_an_update_waits_no_more_for_a_server_that_is_taken_away_in_an_update_before(servers, model):
    named = Named(servers | {"b": Endless(model)}, "a")
    async with asyncio.timeout(60), named.pool() as pool:
        await pool.sync(WeightsOf(model), 1)
        named.now.append("b")
        await until(lambda: named.servers["b"].syncs)
        brought = asyncio.ensure_future(pool.sync(WeightsOf(sharp_model(1)), 2))
        await until(lambda: servers["a"].version == 2)
        named.now.remove("b")
        await brought
        assert pool.serving == ["a"]
        assert not named.servers["b"].closed.is_set(), "it may still end"
    assert named.servers["b"].closed.is_set()


async def test_an_update_that_never_ends_is_broken_off_when_its_server_is_taken_away(servers, model):
    named = Named(servers | {"b": Endless(model)}, "a", "b")
    async with asyncio.timeout(60), named.pool(patience_s=0.3) as pool:
        brought = asyncio.ensure_future(pool.sync(WeightsOf(model), 1))
        await until(lambda: named.servers["b"].syncs and servers["a"].version == 1)
        named.now.remove("b")
        await brought
        assert pool.serving == ["a"]
        assert not named.says("it is sent them again")


async def test_closing_waits_for_no_update(servers, model):
    named = Named(servers | {"b": Endless(model)}, "a")
    async with asyncio.timeout(10):
        async with named.pool() as pool:
            await pool.sync(WeightsOf(model), 1)
            named.now.append("b")
            await until(lambda: named.servers["b"].syncs)


class Lent(WeightsOf):
    """Weights that the trainer has only while they are published, as those of a broadcast."""

    lent = True


class Broadcast(Server):
    """A server that takes lent weights, and ends no update before `takes` is set."""

    def __init__(self, model):
        super().__init__(model)
        self.takes = asyncio.Event()
        self.takes.set()
        self.tried = 0

    async def sync(self, source, version):
        self.tried += source.lent
        await self.takes.wait()
        if not source.lent:
            raise WeightsReleasedError(f"the weights of version {version} are the trainer's no more")
        await super().sync(source, version)


async def publish(pool, model, version):
    source = Lent(model)
    await pool.sync(source, version)
    source.lent = False


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_updates_wait_again_for_a_server_that_is_back_between_two_of_them(model, looks):
    """However often a look at it alone was in vain, too, before the weights were released."""

    async def be_late_once():
        late = Broadcast(model)
        servers = {"a": Broadcast(model), "b": late}
        async with asyncio.timeout(300), pool_of(servers, update_timeout_s=60) as pool:
            late.takes.clear()
            source = Lent(model)
            published = asyncio.ensure_future(pool.sync(source, 1))
            await until(lambda: late.tried and servers["a"].version == 1)
            await clock().forward(61)
            await published
            assert pool.serving == ["a"]
            for look in range(looks):
                await until(lambda tries=2 + look: late.tried == tries)
                await clock().forward(61)
            source.lent = False
            late.takes.set()
            while "are the trainer's no more" not in (await pool.health()).detail:
                await asyncio.sleep(0.005)
            await publish(pool, model, 2)
            assert pool.serving == ["a", "b"]

    on_a_clock(be_late_once())


def test_updates_wait_ever_less_often_for_a_server_that_answers_and_never_takes_them():
    member = Member("a", None, None, connected=True)
    waited = []
    for version in range(1, 40):
        if member.waited_for:
            waited.append(version)
            member.overran()
        member.missed()  # it is back, after the update
    assert waited == [1, 2, 4, 8, 16, 32]


class Suspicious:
    """A check that finds fault with a server the first few times."""

    def __init__(self, name, times):
        self.name, self.times, self.asked = name, times, 0

    async def __call__(self, name, client):
        if name == self.name:
            self.asked += 1
            if self.asked <= self.times:
                raise WrongWeightsError(f"{name} has others")


async def test_wrong_weights_are_sent_again_once(servers, model):
    said = []
    async with pool_of(servers, check=Suspicious("b", 1), say=said.append) as pool:
        await pool.sync(WeightsOf(model), 1)
        assert pool.serving == ["a", "b"]
    assert servers["b"].syncs == [1, 1]
    assert servers["a"].syncs == [1]
    assert said == ["b has others; it is sent them again"]


async def test_wrong_weights_end_the_sync(servers, model):
    async with pool_of(servers, check=Suspicious("b", 9)) as pool:
        with pytest.raises(WrongWeightsError, match="b has others"):
            await pool.sync(WeightsOf(model), 1)
        assert "b" not in pool.serving
