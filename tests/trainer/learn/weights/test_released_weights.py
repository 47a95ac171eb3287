"""Training resumes while a server that was gone still takes the weights of the last version, or is looked at."""

import asyncio
import threading

import pytest
import torch

from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.inference.errors import WeightsReleasedError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.pool import ServerPool
from rollgym.trainer.learn.weights.broadcast import TensorBroadcast
from rollgym.trainer.learn.weights.checksums import ChecksumCheck
from rollgym.trainer.learn.weights.publisher import BackendWeights, SharedReading, WeightPublisher
from rollgym.trainer.learn.weights.verification import (
    Tolerance,
    WeightCheck,
    log_probabilities,
    probe_prompts,
)
from tests.support.inference_server.running import InferenceServer
from tests.support.tiny_models import VOCABULARY, sharp_model
from tests.support.weight_senders import backend_of


class HeldUp(TensorBroadcast):
    """A broadcast whose second bucket waits as long as `goes_on` is not set."""

    def __init__(self, dialect):
        host = "127.0.0.1"
        device = torch.device("cpu")
        super().__init__(
            dialect, collective="gloo", host=host, bucket_bytes=2000, device=device, timeout_s=30.0
        )
        self.goes_on = asyncio.Event()
        self.sent = 0

    async def send(self, bucket):
        self.sent += 1
        if self.sent == 2:
            await self.goes_on.wait()
        await super().send(bucket)


def trained_on(model):
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.1)


async def test_a_server_never_serves_what_it_was_sent_of_two_versions(start):
    with InferenceServer("vllm", model=start) as first, InferenceServer("vllm", model=start) as late:
        carriers = {each.url: HeldUp("vllm") for each in (first, late)}
        clients = {
            url: ServerClient(url, "vllm", way="broadcast", carrier=carrier, patience_s=5.0)
            for url, carrier in carriers.items()
        }
        async with (
            asyncio.timeout(60),
            ServerPool(clients, max_concurrent=8, patience_s=20.0, look_every_s=0.05) as pool,
        ):
            (other,) = (each for each in pool._servers if each.name == late.url)
            pool._servers.lost(other, ConnectionError("gone"))
            model = sharp_model(8)
            publisher = WeightPublisher([pool])
            publishing = asyncio.ensure_future(publisher.publish(backend_of(model), 8))
            while carriers[late.url].sent < 2:  # it is back while the update of the first one is under way
                await asyncio.sleep(0.01)
            carriers[first.url].goes_on.set()
            await publishing
            trained_on(model)
            carriers[late.url].goes_on.set()
            while "are the trainer's no more" not in (await pool.health()).detail:
                assert pool.serving == [first.url]
                await asyncio.sleep(0.01)
            await publisher.publish(backend_of(sharp_model(9)), 9)
            assert sorted(pool.serving) == sorted([first.url, late.url])
            (expected,) = log_probabilities(backend_of(sharp_model(9)), [([3, 4], [5, 6])])
            assert late.logprobs([3, 4, 5, 6])[1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("form", ["tensors", "parameters"])
def test_who_reads_weights_is_told_when_training_resumes(form):
    source = BackendWeights(backend_of(sharp_model(1)), 3)
    reading = getattr(source, form)()
    next(reading)
    source.release()
    with pytest.raises(WeightsReleasedError, match="version 3 are the trainer's no more"):
        next(reading)
    with pytest.raises(WeightsReleasedError, match="version 3"):
        getattr(source, form)()


def test_no_pass_begins_once_what_was_read_is_dropped():
    passes = []

    def read():
        passes.append(1)
        yield "a", torch.zeros(1)
        yield "b", torch.zeros(1)

    shared = SharedReading(read)
    reader = shared.reader()
    next(reader)
    shared.drop()
    with pytest.raises(WeightsReleasedError):
        next(reader)
    assert len(passes) == 1


class Computing:
    """A backend that computes nothing as long as `goes_on` is not set."""

    def __init__(self):
        self._backend = backend_of(sharp_model(1))
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def _wait(self):
        self.begun.set()
        assert self.goes_on.wait(60)

    def forward(self, rows):
        self._wait()
        return self._backend.forward(rows)

    def export(self):
        self._wait()
        return self._backend.export()


class Answers:
    """A server that has the weights of a backend, and tells a checksum."""

    async def generate(self, request):
        ids = [1] * request.sampling.max_new_tokens
        (said,) = log_probabilities(backend_of(sharp_model(1)), [(request.prompt_ids, ids)])
        return GenerationResult(ids, said, [1] * len(ids), "length")

    async def checksums(self):
        return {"model.norm.weight": "0" * 16}


@pytest.mark.parametrize("kind", ["log-probabilities", "checksums"])
async def test_training_resumes_when_nothing_is_computed_of_its_weights_any_more(kind):
    backend = Computing()
    if kind == "checksums":
        check = ChecksumCheck(torch.float32)
    else:
        check = WeightCheck(
            probe_prompts([3, 4], VOCABULARY, 64, Tolerance(1e-3)), 1.0, Tolerance(1e-3), seed=0
        )
    check.begin(1, backend)
    checking = asyncio.ensure_future(check("late", Answers()))
    await asyncio.to_thread(backend.begun.wait, 60)
    ended = asyncio.ensure_future(check.end())
    await asyncio.wait([ended], timeout=0.2)
    assert not ended.done()
    backend.goes_on.set()
    await asyncio.gather(checking, ended)
