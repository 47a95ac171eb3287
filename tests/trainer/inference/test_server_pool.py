"""Several servers as one client: where requests go, and what becomes of them when servers go and come back."""

import asyncio
from dataclasses import replace

import pytest

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.base import GenerationRequest, InferenceHealth, SamplingParams
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    MalformedReplyError,
    NoServerError,
    RequestRefusedError,
    SharedServerError,
    WeightUpdateError,
    WrongWeightsError,
)
from rollgym.trainer.inference.members import Roster
from rollgym.trainer.inference.pool import ServerPool
from rollgym.trainer.inference.starts import Starts
from rollgym.trainer.inference.torch_engine import TorchEngine
from tests.support.tiny_models import WeightsOf, reference_logprobs, sharp_model


class Server:
    """An engine that can be unplugged: whoever talks to it then is told that the connection is lost."""

    def __init__(self, model):
        self._engine = TorchEngine(model, max_rows=4, max_length=64)
        self.plugged = asyncio.Event()
        self.plugged.set()
        self.unplugged = asyncio.Event()
        self.seen = []
        self.syncs = []
        self.most_running = 0
        self.looks = 0
        self.answers = []
        self.breaks_after = None
        self._running = 0

    def unplug(self):
        self.plugged.clear()
        self.unplugged.set()

    def plug(self):
        self.unplugged.clear()
        self.plugged.set()

    async def _connected(self, call):
        if not self.plugged.is_set():
            call.close()
            raise ConnectionError("connection refused")
        answer, lost = asyncio.ensure_future(call), asyncio.ensure_future(self.unplugged.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ConnectionError("connection reset")
        finally:
            answer.cancel()
            lost.cancel()

    @property
    def version(self):
        return self._engine.version

    @property
    def counters(self):
        return self._engine.counters

    async def connect(self):
        if not self.plugged.is_set():
            raise ConnectionError("connection refused")

    async def generate(self, request):
        self.seen.append(request)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            return await self._connected(self._engine.generate(request))
        finally:
            self._running -= 1

    async def extend(self, reply):
        if self.answers:
            raise self.answers.pop(0)
        sampling = reply.sampling
        if self.breaks_after is not None:
            sampling = replace(sampling, max_new_tokens=self.breaks_after)
        result = await self.generate(replace(reply.request, prompt_ids=reply.prompt_ids, sampling=sampling))
        reply.add(result.token_ids, result.logprobs, result.policy_versions)
        if self.breaks_after is not None:
            self.breaks_after = None
            raise ConnectionError("connection reset")
        return result.finish_reason

    async def generate_together(self, requests):
        raise AssertionError("the pool batches nothing")

    async def abort(self, request_ids=None):
        return await self._connected(self._engine.abort(request_ids))

    async def pause(self, mode):
        await self._connected(self._engine.pause(mode))

    async def resume(self):
        await self._connected(self._engine.resume())

    async def sync(self, source, version):
        self.syncs.append(version)
        await self._connected(self._engine.sync(source, version))

    async def health(self):
        self.looks += 1
        return InferenceHealth(
            self.plugged.is_set(), "fine" if self.plugged.is_set() else "connection refused"
        )

    async def close(self):
        await self._engine.close()


@pytest.fixture
def model():
    return sharp_model()


@pytest.fixture
def servers(model):
    return {"a": Server(model), "b": Server(model)}


def pool_of(servers, **options):
    options = {"max_concurrent": 8, "patience_s": 20.0, "look_every_s": 0.01} | options
    return ServerPool(servers, **options)


@pytest.fixture
async def pool(servers, model):
    async with asyncio.timeout(60), pool_of(servers) as running:
        await running.sync(WeightsOf(model), 1)
        yield running


def request(number, tokens=6, session=""):
    prompt = [3 + number % 30, 4]
    return GenerationRequest(f"r{number}", prompt, SamplingParams(tokens), number, (number,), session)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_replies_are_those_of_one_server(pool, model):
    asked = [request(number) for number in range(12)]
    replies = await pool.generate_together(asked)
    for each, reply in zip(asked, replies, strict=True):
        expected = reference_logprobs(model, each.prompt_ids + reply.token_ids)[1:]
        assert reply.logprobs == pytest.approx(expected, abs=2e-4)
        assert reply.policy_versions == [1] * 6
    assert pool.counters.requests == 12
    assert pool.counters.tokens_generated == 72


async def test_both_servers_work_and_an_episode_stays_with_one(pool, servers):
    for turn in range(3):
        await asyncio.gather(
            *(pool.generate(request(number * 10 + turn, session=f"s{number}")) for number in range(8))
        )
    where = {name: {each.session_key for each in server.seen} for name, server in servers.items()}
    assert where["a"]
    assert where["b"]
    assert not where["a"] & where["b"]


async def test_no_more_requests_are_under_way_than_a_server_takes(servers, model):
    async with pool_of(servers, max_concurrent=2) as pool:
        await pool.sync(WeightsOf(model), 1)
        await asyncio.gather(*(pool.generate(request(number)) for number in range(20)))
    assert max(server.most_running for server in servers.values()) == 2


async def test_requests_of_a_lost_server_are_answered_elsewhere(pool, servers):
    asked = [asyncio.ensure_future(pool.generate(request(number, 40))) for number in range(8)]
    await until(lambda: len(servers["a"].seen) and len(servers["b"].seen))
    lost = len(servers["a"].seen)
    servers["a"].unplug()
    replies = await asyncio.gather(*asked)
    assert all(len(reply.token_ids) == 40 for reply in replies)
    assert pool.serving == ["b"]
    assert lost
    assert pool.counters.resubmitted == lost


async def test_what_a_lost_server_has_drawn_is_not_drawn_again(pool, servers, model):
    """An update that came in between has brought the first tokens to the trainer."""
    for server in servers.values():
        server.breaks_after = 4
    reply = await pool.generate(request(0, 10))
    first, *others = [each for server in servers.values() for each in server.seen]
    assert sorted(len(each.prompt_ids) for each in (first, *others)) == [2, 6, 10]
    assert pool.counters.tokens_generated == len(reply.token_ids) == 10
    assert reply.logprobs == pytest.approx(reference_logprobs(model, [3, 4, *reply.token_ids])[1:], abs=2e-4)


async def test_an_answer_that_is_none_is_asked_for_again(pool, servers):
    for server in servers.values():
        server.answers = [MalformedReplyError("the answer is not JSON")]
    assert len((await pool.generate(request(0))).token_ids) == 6
    assert len(pool.serving) == 2


async def test_a_request_that_nobody_answers_is_an_error_and_so_is_one_that_is_refused(pool, servers):
    for server in servers.values():
        server.answers = [MalformedReplyError("the log-probability of token 0 is nan")] * 2
    with pytest.raises(MalformedReplyError, match="nan"):
        await pool.generate(request(0))
    for server in servers.values():
        server.answers = [RequestRefusedError("too long", 400)]
    with pytest.raises(RequestRefusedError, match="too long"):
        await pool.generate(request(0))
    assert sum(len(server.answers) for server in servers.values()) == 1, (
        "a refused request is refused anywhere"
    )


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


async def test_requests_wait_while_no_server_is_there(pool, servers):
    for server in servers.values():
        server.unplug()
    asked = asyncio.ensure_future(pool.generate(request(0)))
    await until(lambda: not pool.serving)
    assert not (await pool.health()).ready
    servers["b"].plug()
    assert len((await asked).token_ids) == 6


async def test_weights_wait_while_no_server_is_there(pool, servers):
    for server in servers.values():
        server.unplug()
    brought = asyncio.ensure_future(pool.sync(WeightsOf(sharp_model(1)), 2))
    await until(lambda: not pool.serving)
    servers["b"].plug()
    await brought
    assert (pool.version, servers["b"].version) == (2, 2)


async def test_servers_that_are_all_gone_for_too_long_are_an_error_that_names_them(servers, model):
    async with pool_of(servers, patience_s=0.2) as pool:
        await pool.sync(WeightsOf(model), 1)
        for server in servers.values():
            server.unplug()
        with pytest.raises(
            NoServerError, match=r"0\.2 s \(inference\.patience_s\): a: .*refused; b: .*refused"
        ):
            await pool.generate(request(0))
        with pytest.raises(NoServerError, match="connection refused"):
            await pool.sync(WeightsOf(model), 2)


async def test_patience_does_not_run_out_while_a_server_is_started_again(servers, model):
    starts = Starts()
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


async def test_closing_ends_those_who_wait(servers):
    async with pool_of(servers) as pool:
        asked = asyncio.ensure_future(pool.generate(request(0)))
        await asyncio.sleep(0)
    with pytest.raises(NoServerError, match="the run ends"):
        await asked


async def test_a_pool_without_any_server_does_not_open(servers):
    for server in servers.values():
        server.unplug()
    with pytest.raises(NoServerError, match=r"for 0\.1 s \(inference\.patience_s\): .*refused"):
        async with pool_of(servers, patience_s=0.1):
            raise AssertionError("it opened")


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


class Sleeper(Server):
    """A server that goes to sleep and says so too late. A request to it while it sleeps would end it."""

    def __init__(self, model):
        super().__init__(model)
        self.steps = []

    async def connect(self):
        self.steps.append("connect")

    async def sleep(self, *, keep_weights):
        self.steps.append("sleep")
        raise TimeoutError("no answer for 5 s")

    async def wake(self, tags):
        self.steps += tags

    async def sync(self, source, version):
        self.steps.append("sync")
        await super().sync(source, version)


async def test_a_server_that_may_sleep_is_not_asked_before_its_next_weights(model):
    """A probe would generate on memory that it has given back."""
    sleeper, other = Sleeper(model), Sleeper(model)
    async with asyncio.timeout(60), pool_of({"a": sleeper, "b": other}) as pool:
        await pool.sync(WeightsOf(model), 1)
        await pool.sleep(keep_weights=True)
        assert pool.serving == []
        await asyncio.sleep(0.1)  # ten looks
        await pool.sync(WeightsOf(sharp_model(1)), 2)
        for server in (sleeper, other):
            assert server.steps == ["connect", "sync", "sleep", "weights", "sync", "kv_cache"]
        assert pool.serving == ["a", "b"]


async def test_a_server_that_is_gone_when_it_is_to_wake_is_met_again(model):
    """Who was started again is awake."""
    sleeper = Sleeper(model)
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
        assert sleeper.steps[:5] == ["connect", "sync", "sleep", "connect", "sync"]


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
    async with asyncio.timeout(60), pool_of(servers, roster=Roster(roster.names, servers.get)) as pool:
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
        return pool_of(servers, say=self.said.append, roster=Roster(self.names, self.servers.get), **options)

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


async def test_an_abort_reaches_all_servers(pool, servers):
    asked = [asyncio.ensure_future(pool.generate(request(number, 60))) for number in range(6)]
    await until(lambda: servers["a"].seen and servers["b"].seen)
    ended = 0
    while ended < 6:
        ended += await pool.abort()
    assert {reply.finish_reason for reply in await asyncio.gather(*asked)} == {"abort"}


async def test_servers_that_do_not_answer_at_the_start_are_named_at_once(servers, model):
    said = []
    servers["b"].unplug()
    async with pool_of(servers, say=said.append):
        assert said == [
            "1 of 2 inference servers do not answer yet, and are looked for again: b: connection refused"
        ]


async def test_a_start_without_any_server_says_so_before_its_patience_ends(servers, model):
    said = []
    for server in servers.values():
        server.unplug()

    def say(text):
        said.append(text)
        servers["a"].plug()

    async with asyncio.timeout(30), pool_of(servers, say=say) as pool:
        assert "2 of 2 inference servers do not answer yet" in said[0]
        await pool.sync(WeightsOf(model), 1)
        assert "a" in pool.serving


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


async def test_servers_of_unequal_tokens_carry_equal_loads(pool, servers):
    """Load is tokens, not requests: one long reply weighs as much as many short ones."""
    long = asyncio.ensure_future(pool.generate(request(0, 50, "long")))
    await until(lambda: servers["a"].seen or servers["b"].seen)
    busy = "a" if servers["a"].seen else "b"
    short = [asyncio.ensure_future(pool.generate(request(number, 2, f"s{number}"))) for number in range(1, 6)]
    await asyncio.gather(*short, long)
    assert [each.session_key for each in servers[busy].seen] == ["long"]
