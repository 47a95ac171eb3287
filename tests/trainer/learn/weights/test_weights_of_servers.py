"""Weights on their way to servers of both dialects: by folders and by a group, each looked at after it arrived."""

import asyncio
import json
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.errors import BroadcastGroupError, WrongWeightsError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.pool import ServerPool
from rollgym.trainer.learn.weights.broadcast import TensorBroadcast, buckets
from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolders
from rollgym.trainer.learn.weights.publisher import ModelWeights, WeightPublisher
from rollgym.trainer.learn.weights.verification import (
    WeightCheck,
    log_probabilities,
    probe_prompts,
    tolerance_for,
)
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.models.weights import hub_tensors
from tests.support.forked_ranks import ForkedRanks
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess
from tests.support.inference_server.weights import digests
from tests.support.rank_recipes import Adapted, Recipe
from tests.support.tiny_models import VOCABULARY, adapted_model, sharp_model
from tests.support.weight_senders import backend_of

DIALECTS = ("vllm", "sglang")
WAYS = ("disk", "broadcast")


@pytest.fixture(scope="module", params=DIALECTS)
def servers(request, start):
    with (
        InferenceServer(request.param, model=start) as first,
        InferenceServer(request.param, model=start, inference_world=1) as second,
    ):
        yield [first, second]


def client_of(server, way, carrier=TensorBroadcast):
    carrier = carrier(
        server.dialect,
        collective="gloo",
        host="127.0.0.1",
        bucket_bytes=2000,
        device=torch.device("cpu"),
        timeout_s=30.0,
    )
    return ServerClient(server.url, server.dialect, way=way, carrier=carrier, patience_s=5.0)


@asynccontextmanager
async def opened(servers, way, tmp_path, said=None, look_every_s=5.0, quantised=False):
    """A pool of the servers and what publishes to it."""
    async with AsyncExitStack() as stack:
        folders = stack.enter_context(
            WeightFolders(tmp_path / "weights", ModelLayout(sharp_model(), build_tiny_tokenizer()))
        )
        tolerance = tolerance_for("float32", "fp8" if quantised else None)
        check = WeightCheck(probe_prompts([3, 4, 5], VOCABULARY, 64, tolerance), 1.0, tolerance, seed=0)
        pool = ServerPool(
            {server.url: client_of(server, way) for server in servers},
            max_concurrent=8,
            patience_s=20.0,
            check=check,
            look_every_s=look_every_s,
            say=(said if said is not None else []).append,
        )
        await stack.enter_async_context(pool)
        yield pool, WeightPublisher([pool], folders, check)


@pytest.mark.parametrize("way", WAYS)
async def test_weights_arrive_and_are_verified_at_every_server(servers, way, tmp_path):
    async with opened(servers, way, tmp_path) as (pool, publisher):
        for version in (1, 2):
            model = sharp_model(version)
            metrics = await publisher.publish(backend_of(model), version)
            assert metrics["sync/probe_difference"] < 1e-4
            assert len(pool.serving) == 2
            if way == "disk":
                size = sum(parameter.numel() * 4 for parameter in model.parameters())
                assert metrics["sync/bytes"] == size, "written once, for both"
            requests = [
                GenerationRequest(f"{way}-{version}-{number}", [3, number], SamplingParams(4), number)
                for number in range(4)
            ]
            replies = await pool.generate_together(requests)
            assert {each for reply in replies for each in reply.policy_versions} == {version}


@pytest.mark.parametrize("way", WAYS)
async def test_a_success_with_wrong_weights_is_found_and_sent_again(servers, way, tmp_path):
    said = []
    async with opened(servers, way, tmp_path, said) as (pool, publisher):
        servers[1].weights(wrong=True)
        metrics = await publisher.publish(backend_of(sharp_model(3)), 3)
        assert metrics["sync/probe_difference"] > 1e-3
        assert len(pool.serving) == 2
    assert len(said) == 1
    assert f"{servers[1].url} took the weights of version 3 and answers with others" in said[0]
    assert said[0].endswith("it is sent them again")


async def test_weights_that_stay_wrong_end_the_run_with_server_version_and_difference(
    servers, tmp_path, monkeypatch
):
    """The servers read a folder that the trainer has not written: a mount of yesterday."""
    async with opened(servers, "disk", tmp_path) as (pool, publisher):
        other = backend_of(sharp_model(5))
        write = WeightFolders.write
        monkeypatch.setattr(
            WeightFolders, "write", lambda self, version, _: write(self, version, other.export())
        )
        with pytest.raises(
            WrongWeightsError,
            match=r"http://.* took the weights of version 4 and answers with others: .* up to \d.*, and 0\.001 is",
        ):
            await publisher.publish(backend_of(sharp_model(4)), 4)
        assert pool.serving == []


async def test_adapters_travel_alone_and_are_verified(start, tmp_path):
    """The base stays as it was at the server, and each version is another adapter."""
    with InferenceServer("vllm", model=start) as server:
        async with opened([server], "adapter", tmp_path) as (pool, publisher):
            for version in (1, 2):
                metrics = await publisher.publish(backend_of(adapted_model(version)), version)
                assert metrics["sync/probe_difference"] < 1e-4
                folders = [path.name for path in (tmp_path / "weights").iterdir() if path.is_dir()]
                assert folders == [f"adapter-{version:08d}"]
            assert 0 < metrics["sync/bytes"] < sum(each.numel() * 4 for each in sharp_model().parameters())
            assert pool.version == 2


async def test_weights_that_a_server_quantises_are_allowed_for_where_the_run_knows_of_it(start, tmp_path):
    with InferenceServer("vllm", model=start, quantization="fp8") as server:
        async with opened([server], "disk", tmp_path / "known", quantised=True) as (pool, publisher):
            for version in (1, 2):
                metrics = await publisher.publish(backend_of(sharp_model(version)), version)
                assert metrics["sync/probe_difference"] > 1e-2
            reply = await pool.generate(GenerationRequest("r", [3, 4], SamplingParams(8), 0))
            (ours,) = log_probabilities(backend_of(sharp_model(2)), [([3, 4], reply.token_ids)])
            assert reply.logprobs != pytest.approx(ours, abs=1e-3), (
                "what samples is not quite what is trained"
            )
        async with opened([server], "disk", tmp_path / "unknown") as (pool, publisher):
            with pytest.raises(WrongWeightsError, match=r"inference\.quantization"):
                await publisher.publish(backend_of(sharp_model(1)), 1)


def opened_ranks(folder, mesh):
    pair = Ranks(ForkedRanks(folder), mesh, "cpu", 60.0)
    pair.start()
    return pair


@pytest.fixture(scope="module")
def data_ranks(tmp_path_factory):
    """Two processes that share a model's weights."""
    pair = opened_ranks(tmp_path_factory.mktemp("data"), MeshShape(data=2))
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def tensor_ranks(tmp_path_factory):
    """Two processes that share each layer."""
    pair = opened_ranks(tmp_path_factory.mktemp("tensor"), MeshShape(tensor=2))
    yield pair
    pair.close()


HOLDERS = [
    ("torch", None),
    ("fsdp2", "data_ranks"),
    pytest.param("fsdp2", "tensor_ranks", marks=pytest.mark.slow),
    pytest.param("zero3", "data_ranks", marks=pytest.mark.slow),
]


async def held_by(request, kind, ranks, recipe, name):
    """A backend of a kind, in this process or in ranks."""
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
    pair = await asyncio.to_thread(request.getfixturevalue, ranks)
    return await asyncio.to_thread(RankedBackend, pair, name, recipe, 16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "ranks"), HOLDERS)
async def test_each_weight_arrives_once_whoever_holds_it(servers, kind, ranks, way, tmp_path, request):
    if ranks is None:
        backend = backend_of(sharp_model(3))
    else:
        recipe = Recipe(kind, "policy", OptimizerSettings(), 1e-3, seed=3)
        backend = await held_by(request, kind, ranks, recipe, f"{way}-{servers[0].dialect}")
    expected = digests(hub_tensors(sharp_model(3)))
    assert "lm_head.weight" not in dict(expected), "the head is the embedding"
    for server in servers:
        server.received()
    gathered = []
    export = backend.export
    backend.export = lambda: gathered.append(1) or export()
    async with opened(servers, way, tmp_path) as (pool, publisher):
        metrics = await publisher.publish(backend, 1)
        assert metrics["sync/probe_difference"] < 1e-4
        assert len(pool.serving) == 2
        assert len(gathered) == (2 if ranks is None and way == "broadcast" else 1), "once for all servers"
        for server in servers:
            received = server.received()
            assert sorted(received) == sorted(expected)
            assert way == "disk" or received == expected, "in the model's order"
    if ranks is not None:
        await asyncio.to_thread(backend.drop)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("fsdp2", "data_ranks"), pytest.param("zero3", "data_ranks", marks=pytest.mark.slow)]
)
async def test_adapters_that_two_ranks_hold_travel_alone(start, kind, ranks, tmp_path, request):
    backend = await held_by(request, kind, ranks, Adapted(kind), "adapted")
    with InferenceServer("vllm", model=start) as server:
        async with opened([server], "adapter", tmp_path) as (pool, publisher):
            metrics = await publisher.publish(backend, 1)
            assert metrics["sync/probe_difference"] < 1e-4
            assert 0 < metrics["sync/bytes"] < sum(each.numel() * 4 for each in sharp_model().parameters())
            assert pool.version == 1
            assert server.received() == [], "the base stays as it is"
    await asyncio.to_thread(backend.drop)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_servers_sleep_while_the_policy_is_trained_and_wake_with_its_weights(
    servers, tmp_path, keep_weights
):
    async with opened(servers, "disk", tmp_path) as (pool, publisher):
        await publisher.publish(backend_of(sharp_model(6)), 6)
        await pool.sleep(keep_weights=keep_weights)
        asked = asyncio.ensure_future(pool.generate(GenerationRequest("r", [3, 4], SamplingParams(2), 0)))
        metrics = await publisher.publish(backend_of(sharp_model(7)), 7)
        assert metrics["sync/probe_difference"] < 1e-4
        assert (await asked).policy_versions == [7, 7]
        assert len(pool.serving) == 2


@pytest.mark.slow
async def test_a_server_that_was_killed_is_brought_up_to_date_before_it_answers(start, tmp_path):
    """Its new process has the weights that it was started with, and says so by no error."""
    with (
        InferenceServer("vllm", model=start) as other,
        InferenceServerProcess("vllm", "--model", str(start)) as server,
    ):
        async with opened([other, server], "disk", tmp_path, look_every_s=0.1) as (pool, publisher):
            await publisher.publish(backend_of(sharp_model(8)), 8)
            server.kill()
            requests = [GenerationRequest(f"r{n}", [3, n], SamplingParams(4), n) for n in range(8)]
            replies = await pool.generate_together(requests)
            assert {each for reply in replies for each in reply.policy_versions} == {8}
            server.start()
            async with asyncio.timeout(60):
                while server.url not in pool.serving:
                    await asyncio.sleep(0.05)
            (expected,) = log_probabilities(backend_of(sharp_model(8)), [([3, 4], [5, 6])])
            assert server.logprobs([3, 4, 5, 6])[1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
async def test_a_server_that_was_killed_takes_the_next_broadcast_at_once(start, tmp_path):
    """Its new process is in no group: the trainer meets it in a new one, without failing in the old one first."""
    said = []
    with (
        InferenceServer("vllm", model=start) as other,
        InferenceServerProcess("vllm", "--model", str(start)) as server,
    ):
        async with opened([other, server], "broadcast", tmp_path, said, look_every_s=0.1) as (
            pool,
            publisher,
        ):
            await publisher.publish(backend_of(sharp_model(8)), 8)
            server.kill()
            async with asyncio.timeout(60):
                while server.url in pool.serving:
                    await asyncio.sleep(0.05)
            server.start()
            async with asyncio.timeout(60):
                while "are the trainer's no more" not in (await pool.health()).detail:
                    await asyncio.sleep(0.05)
            metrics = await publisher.publish(backend_of(sharp_model(9)), 9)
            assert metrics["sync/probe_difference"] < 1e-4
            assert server.url in pool.serving
    assert not any("sent them again" in line for line in said)


JOINS = {"vllm": "/init_weight_transfer_engine", "sglang": "/init_weights_update_group"}


async def test_a_group_that_cannot_be_made_again_is_an_error_with_a_remedy(servers):
    server, _ = servers
    text = [3, 4, 5, 6]

    def served():
        return server.logprobs(text)[1:]

    def of(seed):
        (expected,) = log_probabilities(backend_of(sharp_model(seed)), [([3, 4], [5, 6])])
        return pytest.approx(expected, abs=1e-4)

    async with asyncio.timeout(60), client_of(server, "broadcast") as client:
        await client.sync(ModelWeights(sharp_model(8)), 8)
        await client._updates.leave_group()
        refused = {"message": "the engine's process has died", "type": "EngineDeadError", "code": 500}
        body = json.dumps({"error": refused} if server.dialect == "vllm" else refused)
        server.fail(
            {"kind": "answer", "path": JOINS[server.dialect], "status": 500, "count": -1, "body": body}
        )
        try:
            with pytest.raises(BroadcastGroupError, match="cannot be made again") as failed:
                await client.sync(ModelWeights(sharp_model(9)), 9)
        finally:
            server.fail()
        for words in (server.url, "version 9", "has died", "weights.transport to disk", "checkpoint.resume"):
            assert words in str(failed.value)
        assert served() == of(8), "nothing else was tried"
        await client.sync(ModelWeights(sharp_model(9)), 9)
        assert served() == of(9)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with another"])
async def test_who_cannot_be_met_again_is_left_by_the_others_or_ends_the_run(start, tmp_path, alone):
    """It was killed, and its new process refuses to join."""
    said = []
    with (
        InferenceServer("vllm", model=start) as other,
        InferenceServerProcess("vllm", "--model", str(start)) as server,
    ):
        known = [server] if alone else [other, server]
        async with opened(known, "broadcast", tmp_path, said, look_every_s=0.1) as (pool, publisher):
            await publisher.publish(backend_of(sharp_model(8)), 8)
            server.kill()
            async with asyncio.timeout(60):
                while server.url in pool.serving:
                    await asyncio.sleep(0.05)
            server.start()
            server.fail({"kind": "answer", "path": JOINS["vllm"], "status": 500, "count": -1})
            if alone:
                with pytest.raises(BroadcastGroupError, match=r"set weights\.transport to disk"):
                    await publisher.publish(backend_of(sharp_model(9)), 9)
                return
            await publisher.publish(backend_of(sharp_model(9)), 9)
            assert pool.serving == [other.url]
            async with asyncio.timeout(60):
                while "cannot be made" not in (await pool.health()).detail:
                    await asyncio.sleep(0.05)


class BrokenBroadcast(TensorBroadcast):
    """Something happens to the server while it waits for the second bucket; notes which sends came to their end."""

    happens = None

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.sent, self.sending = 0, []

    async def send(self, bucket):
        self.sent += 1
        if self.sent == 2 and self.happens is not None:
            self.happens()
        await super().send(bucket)

    async def _in_thread(self, what, call, *arguments):
        thread = asyncio.ensure_future(super()._in_thread(what, call, *arguments))
        if call != self._meet:
            self.sending.append(thread)
        return await asyncio.shield(thread)


class WaitingGroup:
    """A group whose other ranks are gone, and that says nothing of it, as NCCL's."""

    def __init__(self):
        self.begun, self.aborted = threading.Event(), threading.Event()

    def broadcast(self, tensor):
        self.begun.set()
        assert self.aborted.wait(60)

    def abort(self):
        self.aborted.set()


async def test_a_broadcast_that_waits_for_who_is_gone_is_ended_with_its_update():
    carrier = BrokenBroadcast(
        "vllm", collective="gloo", host="127.0.0.1", bucket_bytes=10**6, device=torch.device("cpu")
    )
    group = carrier._group = WaitingGroup()
    (bucket,) = carrier.buckets(ModelWeights(sharp_model(1)))
    sending = asyncio.ensure_future(carrier.send(bucket))
    await asyncio.to_thread(group.begun.wait, 60)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert group.aborted.is_set()
    assert carrier.sending[-1].done(), "no thread waits any more"
    assert carrier._group is None, "the next update meets in another"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "dialect"),
    [
        pytest.param("kill", "vllm", marks=pytest.mark.exhaustive),
        ("kill", "sglang"),
        ("stand_still", "vllm"),
    ],
)
async def test_a_server_that_ends_in_the_middle_of_a_broadcast_takes_nobody_with_it(
    start, tmp_path, ending, dialect
):
    """Others have the version, nothing waits for it any more, and it gets the next version in a group of its own."""
    said = []
    with (
        InferenceServer(dialect, model=start) as other,
        InferenceServerProcess(dialect, "--model", str(start)) as server,
    ):
        way = {"way": "broadcast", "carrier": BrokenBroadcast}
        clients = {each.url: client_of(each, **way) for each in (other, server)}
        carrier = clients[server.url]._updates._carrier
        check = WeightCheck(
            probe_prompts([3, 4, 5], VOCABULARY, 64, tolerance_for("float32", None)),
            1.0,
            tolerance_for("float32", None),
            seed=0,
        )
        async with ServerPool(
            clients,
            max_concurrent=8,
            patience_s=60.0,
            check=check,
            look_every_s=0.1,
            update_timeout_s=10.0,
            say=said.append,
        ) as pool:
            publisher = WeightPublisher([pool], None, check)
            carrier.happens = getattr(server, ending)
            metrics = await publisher.publish(backend_of(sharp_model(8)), 8)
            assert metrics["sync/probe_difference"] < 1e-4
            assert pool.serving == [other.url]
            assert carrier.sent == 2
            # Of one that stands still, gloo's thread waits as long as its group may take.
            assert ending == "stand_still" or all(each.done() for each in carrier.sending)
            assert server.url in (await pool.health()).detail
            carrier.happens = None
            (server.start if ending == "kill" else server.go_on)()
            async with asyncio.timeout(60):
                while "are the trainer's no more" not in (await pool.health()).detail:
                    await asyncio.sleep(0.05)
            version = 8
            # Of a busy machine, the ten seconds of an update may be too few: then a later one reaches it.
            async with asyncio.timeout(150):
                while len(pool.serving) < 2:
                    version += 1
                    await publisher.publish(backend_of(sharp_model(version)), version)
            (expected,) = log_probabilities(backend_of(sharp_model(version)), [([3, 4], [5, 6])])
            assert server.logprobs([3, 4, 5, 6])[1:] == pytest.approx(expected, abs=1e-4)


def tensors_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("limit", [1, 5000, 10**9])
def test_buckets_hold_all_tensors_in_order_and_no_more_than_they_may(limit):
    tensors = tensors_of(sharp_model())
    cut = list(buckets(iter(tensors), limit))
    assert [name for bucket, _ in cut for name in bucket.names] == [name for name, _ in tensors]
    for bucket, held in cut:
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in held)
        assert size <= limit or len(held) == 1
        assert [list(tensor.shape) for _, tensor in held] == list(bucket.shapes)
        assert set(bucket.dtypes) == {"float32"}


def test_each_server_has_a_group_of_its_own_in_which_the_trainer_is_the_first():
    ends = [
        TensorBroadcast(
            "vllm", collective="gloo", host="10.0.0.1", bucket_bytes=1, device=torch.device("cpu")
        )
        for _ in range(2)
    ]
    for end, ranks in zip(ends, (1, 8), strict=True):
        address = end.address(ranks)
        assert (address.world_size, address.rank_offset) == (ranks + 1, 1)
        assert address.master_address == "10.0.0.1"
    first = ends[0].address(1)
    assert ends[0].address(1).master_port != first.master_port, (
        "a group that broke off may still wait at the old one"
    )


def test_a_broadcast_from_a_processor_that_has_no_accelerator_is_refused():
    with pytest.raises(ConfigError, match=r"set weights\.transport to disk"):
        TensorBroadcast("vllm", collective="nccl", host="a", bucket_bytes=1, device=torch.device("cpu"))
