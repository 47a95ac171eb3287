"""Several servers as one client: where requests go, and what becomes of them when servers are lost."""

import asyncio
import socket

import pytest

from rollgym.trainer.inference.errors import (
    MalformedReplyError,
    NoServerError,
    RequestRefusedError,
)
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.pool import ServerPool
from tests.support.pool_servers import pool_of, request, until
from tests.support.tiny_models import WeightsOf, reference_logprobs, sharp_model


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


async def test_an_address_that_is_wrong_is_named_once_and_looked_for_no_more():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    said, before = [], asyncio.all_tasks()
    client = ServerClient(url, "vllm", way=None, patience_s=0.2)
    pool = ServerPool({url: client}, max_concurrent=1, patience_s=0.1, look_every_s=0.1, say=said.append)
    with pytest.raises(NoServerError) as ended:
        await pool.__aenter__()
    assert str(ended.value).count(url) == 1
    assert [text.count(url) for text in said] == [1]
    assert asyncio.all_tasks() == before


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


async def test_servers_of_unequal_tokens_carry_equal_loads(pool, servers):
    """Load is tokens, not requests: one long reply weighs as much as many short ones."""
    long = asyncio.ensure_future(pool.generate(request(0, 50, "long")))
    await until(lambda: servers["a"].seen or servers["b"].seen)
    busy = "a" if servers["a"].seen else "b"
    short = [asyncio.ensure_future(pool.generate(request(number, 2, f"s{number}"))) for number in range(1, 6)]
    await asyncio.gather(*short, long)
    assert [each.session_key for each in servers[busy].seen] == ["long"]
