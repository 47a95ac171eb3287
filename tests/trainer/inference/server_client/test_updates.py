"""Updates of weights that do not end: the server counts as lost after a while, and the others go on."""

import asyncio

import pytest

from rollgym.trainer.inference.errors import NoServerError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.pool import ServerPool
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, UPDATE_OF, Weights, logprobs_of, request


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


def stalled(server, dialect, path=None, seconds=60.0, times=1):
    """Let a server not answer an update, or several, as one whose scheduler hangs."""
    server.fail(*[{"kind": "late", "path": path or UPDATE_OF[dialect], "seconds": seconds}] * times)


class Pool(ServerPool):
    """Two servers, or one, of a dialect."""

    def __init__(self, dialect, *urls, **options):
        self.said = []
        options = {"patience_s": 20.0, "update_timeout_s": 1.0, "look_every_s": 0.05} | options
        clients = {url: ServerClient(url, dialect, patience_s=10.0, watch_every_s=0.1) for url in urls}
        super().__init__(clients, max_concurrent=8, say=self.said.append, **options)


@BOTH
async def test_a_server_whose_update_does_not_end_is_lost_and_the_others_go_on(dialect, tmp_path):
    with InferenceServer(dialect) as one, InferenceServer(dialect) as other:
        async with asyncio.timeout(60), Pool(dialect, one.url, other.url) as pool:
            stalled(other, dialect, seconds=4.0)
            await pool.sync(Weights(1, tmp_path), 1)
            assert pool.serving == [one.url]
            result = await pool.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))
            # It is brought up to date once it answers again.
            await until(lambda: pool.serving == [one.url, other.url])
            assert (await pool.health()).ready


async def test_a_verification_that_does_not_end_is_one_of_an_update(tmp_path):
    async def check(name, client):
        if name == other.url:
            await asyncio.Event().wait()

    with InferenceServer("sglang") as one, InferenceServer("sglang") as other:
        async with asyncio.timeout(60), Pool("sglang", one.url, other.url, check=check) as pool:
            await pool.sync(Weights(1, tmp_path), 1)
            assert pool.serving == [one.url]


async def test_updates_wait_but_once_for_a_server_whose_updates_do_not_end(tmp_path):
    begun = []

    async def check(name, client):
        if name == other.url:
            begun.append(name)
            await asyncio.Event().wait()

    with InferenceServer("sglang") as one, InferenceServer("sglang") as other:
        options = {"check": check, "update_timeout_s": 3.0}
        async with asyncio.timeout(60), Pool("sglang", one.url, other.url, **options) as pool:
            await pool.sync(Weights(1, tmp_path), 1)
            await until(lambda: len(begun) == 2)  # it is tried again beside the run's work
            await pool.sync(Weights(2, tmp_path), 2)
            assert pool.serving == [one.url]
            assert len(begun) == 2, "nobody has waited for it"


async def test_a_run_whose_only_server_takes_no_weights_ends_with_the_reason(tmp_path):
    with InferenceServer("sglang") as one:
        async with asyncio.timeout(60), Pool("sglang", one.url, patience_s=0.5) as pool:
            stalled(one, "sglang", times=100)  # it is tried again while the run has patience
            with pytest.raises(NoServerError, match=r"version 1 in 1 s \(inference\.update_timeout_s\)"):
                await pool.sync(Weights(1, tmp_path), 1)
