"""Servers that are added to a pool and taken from it while it is used: conformance servers, and weights by disk."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.members import FileRoster, ServerRoster
from rollgym.trainer.inference.server_pool.pool import ServerPool
from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolders
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.learn.weights.verification import Tolerance, WeightCheck, probe_prompts
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess
from tests.support.tiny_models import VOCABULARY, reference_logprobs, sharp_model
from tests.support.weight_senders import backend_of

DIALECTS = ("vllm", "sglang")


@pytest.fixture(scope="module", params=DIALECTS)
def three(request, start):
    with (
        InferenceServer(request.param, model=start) as first,
        InferenceServer(request.param, model=start) as second,
        InferenceServer(request.param, model=start) as third,
    ):
        yield [first, second, third]


class Listed:
    """A file of servers, a pool that follows it, and what publishes to that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self.pool: ServerPool
        self.publisher: WeightPublisher

    def names(self, *servers) -> None:
        self.path.write_text("".join(f"{server.url}\n" for server in servers))

    async def says(self, *words: str) -> None:
        async with asyncio.timeout(30):
            while not any(all(word in line for word in words) for line in self.said):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def following(folder, *servers, look_every_s=0.05, patience_s=20.0):
    listed = Listed(folder / "servers")
    listed.names(*servers)
    roster = FileRoster(listed.path, listed.said.append)

    def meet(url: str) -> ServerClient:
        return ServerClient(url, servers[0].dialect, way="disk", patience_s=5.0)

    tolerance = Tolerance(1e-3)
    check = WeightCheck(probe_prompts([3, 4, 5], VOCABULARY, 64, tolerance), 1.0, tolerance, seed=0)
    with WeightFolders(folder / "weights", ModelLayout(sharp_model(), build_tiny_tokenizer())) as folders:
        listed.pool = ServerPool(
            {url: meet(url) for url in await roster.names()},
            max_concurrent=3,
            patience_s=patience_s,
            check=check,
            look_every_s=look_every_s,
            say=listed.said.append,
            roster=ServerRoster(roster.names, meet),
        )
        listed.publisher = WeightPublisher([listed.pool], folders, check)
        async with asyncio.timeout(90), listed.pool:
            yield listed


def requests(name: str, count: int, tokens: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{name}-{number}", [3, 4 + number], SamplingParams(tokens), number, session_key=f"{name}{number}"
        )
        for number in range(count)
    ]


def ended(server) -> int:
    return len(server.log()["replies"])


def exact(asked, replies, model) -> None:
    """Each reply is drawn by the model, and its log-probabilities are those of its tokens."""
    for each, reply in zip(asked, replies, strict=True):
        expected = reference_logprobs(model, [*each.prompt_ids, *reply.token_ids])[1:]
        assert reply.logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_server_that_is_added_has_the_weights_before_it_is_asked(three, tmp_path):
    first, second, _ = three
    async with following(tmp_path, first) as listed:
        model = sharp_model(1)
        await listed.publisher.publish(backend_of(model), 1)
        listed.names(first, second)
        await listed.says(second.url, "takes requests, with the weights of version 1")
        assert listed.pool.serving == [first.url, second.url]
        before = ended(second)
        asked = requests("added", 12)
        replies = await listed.pool.generate_together(asked)
        exact(asked, replies, model)
        assert {version for reply in replies for version in reply.policy_versions} == {1}
        assert ended(second) > before
        metrics = await listed.publisher.publish(backend_of(sharp_model(2)), 2)
        assert metrics["sync/probe_difference"] < 1e-3
        replies = await listed.pool.generate_together(requests("next", 12))
        assert {version for reply in replies for version in reply.policy_versions} == {2}


async def test_what_a_removed_server_had_under_way_goes_on_elsewhere(three, tmp_path):
    first, second, _ = three
    async with following(tmp_path, first, second) as listed:
        model = sharp_model(1)
        await listed.publisher.publish(backend_of(model), 1)
        try:
            second.steps(2)  # it takes requests, begins some, and answers none
            before = listed.pool.counters
            asked = requests("removed", 12)
            running = asyncio.ensure_future(listed.pool.generate_together(asked))
            await second.until(running=1)
            listed.names(first)
            replies = await running
            exact(asked, replies, model)
            assert listed.pool.serving == [first.url]
            assert listed.pool.counters.resubmitted > before.resubmitted
        finally:
            second.steps(None)
        async with asyncio.timeout(30):
            while second.state()["running"]:
                await asyncio.sleep(0.02)
        quiet = ended(second)
        await listed.pool.generate_together(requests("after", 12))
        assert ended(second) == quiet, "it is asked no more"
        assert listed.pool.counters.requests >= 24, "what it had done still counts"
        listed.names(first, second)
        await listed.says(second.url, "takes requests")
        await listed.pool.generate_together(requests("again", 12))
        assert ended(second) > quiet


async def test_an_update_takes_the_servers_that_are_named_then(three, tmp_path):
    first, second, third = three
    async with following(tmp_path, first, second, look_every_s=600.0) as listed:
        await listed.publisher.publish(backend_of(sharp_model(1)), 1)
        listed.names(second, third)
        await listed.publisher.publish(backend_of(sharp_model(2)), 2)
        await listed.says(third.url, "takes requests, with the weights of version 2")
        assert listed.pool.serving == [second.url, third.url]


async def test_a_server_that_loads_for_ever_is_left_when_it_is_named_no_more(start, three, tmp_path):
    """Its front end lives: nobody can tell it from one that takes its time."""
    first, _, third = three
    with InferenceServer(first.dialect, model=start) as slow:
        async with following(tmp_path, first, patience_s=0.5) as listed:
            await listed.publisher.publish(backend_of(sharp_model(1)), 1)
            path = "/collective_rpc" if first.dialect == "vllm" else "/update_weights_from_disk"
            slow.fail({"kind": "late", "path": path, "seconds": 120.0})
            listed.names(first, slow)
            async with asyncio.timeout(30):
                while not slow.state()["faults"]:
                    await asyncio.sleep(0.02)
            updating = asyncio.ensure_future(listed.publisher.publish(backend_of(sharp_model(2)), 2))
            listed.names(first, third)
            await listed.says(slow.url, "is named no more")
            await updating
            await listed.says(third.url, "takes requests, with the weights of version 2")
            assert listed.pool.serving == [first.url, third.url]


async def test_a_file_that_names_nobody_takes_no_server_away(three, tmp_path):
    first, second, _ = three
    async with following(tmp_path, first, second) as listed:
        await listed.publisher.publish(backend_of(sharp_model(1)), 1)
        listed.path.write_text("")
        await listed.says("names no server", "the 2 servers that it named last stay")
        await listed.pool.generate_together(requests("kept", 4))
        listed.path.unlink()
        await listed.says("cannot read", "No such file", "the 2 servers that it named last stay")
        assert listed.pool.serving == [first.url, second.url]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_that_is_killed_is_replaced_by_another_one(dialect, start, tmp_path):
    """All that there was is gone, and the requests that it had wait for a server that nobody knew of."""
    killed = InferenceServerProcess(dialect, "--model", str(start), "--step-s", "0.05")
    with killed, InferenceServer(dialect, model=start) as other:
        async with following(tmp_path, killed) as listed:
            model = sharp_model(1)
            await listed.publisher.publish(backend_of(model), 1)
            asked = requests("killed", 3, tokens=30)
            running = asyncio.ensure_future(listed.pool.generate_together(asked))
            await killed.until(running=1)
            killed.kill()
            listed.names(other)
            exact(asked, await running, model)
            assert listed.pool.serving == [other.url]


async def test_a_server_that_lacks_something_is_told_of_and_not_asked(start, tmp_path):
    with (
        InferenceServer("vllm", model=start) as good,
        InferenceServer("vllm", model=start, dev_mode=False) as bad,
    ):
        async with following(tmp_path, good) as listed:
            await listed.publisher.publish(backend_of(sharp_model(1)), 1)
            listed.names(good, bad)
            await listed.says(bad.url, "is not asked yet", "VLLM_SERVER_DEV_MODE=1")
            await listed.pool.generate_together(requests("good", 4))
            assert listed.pool.serving == [good.url]
            assert ended(bad) == 0
