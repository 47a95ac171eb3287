"""Servers that took the weights are believed when their log-probabilities say so."""

import dataclasses
import itertools
import math

import pytest
import torch

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.errors import WrongWeightsError
from rollgym.trainer.inference.torch_engine import TorchEngine
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.learn.weights.verification import (
    UnverifiedError,
    WeightCheck,
    probe_prompts,
    tolerance_for,
)
from tests.support.tiny_models import VOCABULARY, WeightsOf, sharp_model

TEMPERATURE = 0.7


@pytest.fixture
def model():
    return sharp_model()


@pytest.fixture
def backend(model):
    head = PolicyHead(model, TEMPERATURE)
    return TorchBackend(head, OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))


@pytest.fixture
async def engine(model):
    async with TorchEngine(model, max_rows=4, max_length=64) as running:
        yield running


@pytest.fixture
def check(backend):
    made = WeightCheck(probe_prompts([3, 4, 5, 6], VOCABULARY, 64), TEMPERATURE, 1e-3, seed=1)
    made.begin(1, backend)
    return made


async def test_equal_weights_agree(check, engine):
    assert await check("server", engine) < 1e-4
    assert check.largest < 1e-4


@pytest.mark.parametrize("name", [name for name, _ in sharp_model().named_parameters()])
async def test_any_weight_that_did_not_arrive_is_found(check, engine, model, name):
    """One tensor of the server's is another one, as where a reload passes over it."""
    other = sharp_model()
    with torch.no_grad():
        tensor = dict(other.named_parameters())[name]
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    await engine.sync(WeightsOf(other), 1)
    with pytest.raises(
        WrongWeightsError, match=r"^server took the weights of version 1 and answers with others: .* 0\.001"
    ):
        await check("server", engine)


class Altered:
    """A server whose answers are altered before they are read."""

    def __init__(self, engine, **changes):
        self._engine, self._changes = engine, changes

    async def generate(self, request):
        return dataclasses.replace(await self._engine.generate(request), **self._changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": []},
        {"logprobs": [], "token_ids": []},
        {"logprobs": [math.nan] * 8},
        {"logprobs": [-math.inf] * 8},
    ],
)
async def test_answers_without_numbers_are_no_proof(check, engine, changes):
    with pytest.raises(WrongWeightsError, match="server"):
        await check("server", Altered(engine, **changes))


class Shifted(Altered):
    """A server some of whose log-probabilities are lower."""

    async def generate(self, request):
        reply = await self._engine.generate(request)
        lower = [self._changes["by"]] * self._changes["tokens"] + [0.0] * len(reply.token_ids)
        return dataclasses.replace(
            reply, logprobs=[each - less for each, less in zip(reply.logprobs, lower, strict=False)]
        )


async def test_single_tokens_may_be_far_apart_where_weights_are_quantised(backend, engine):
    prompts = probe_prompts([3, 4, 5, 6], VOCABULARY, 64)
    quantised, plain = (
        WeightCheck(prompts, TEMPERATURE, 1.0, seed=1, quantised=quantised) for quantised in (True, False)
    )
    for check in (quantised, plain):
        check.begin(1, backend)
    one = Shifted(engine, tokens=1, by=5.0)
    assert await quantised("server", one) == pytest.approx(5.0, abs=1e-3)
    assert quantised.largest == pytest.approx(5.0, abs=1e-3)
    with pytest.raises(WrongWeightsError, match="up to 5 from"):
        await plain("server", one)
    with pytest.raises(WrongWeightsError, match="on average 2 from"):
        await quantised("server", Shifted(engine, tokens=8, by=2.0))


async def test_a_server_that_is_back_is_compared_with_what_was_computed(check, engine):
    await check("first", engine)
    check.end()
    assert await check("back", engine) < 1e-4
    with pytest.raises(UnverifiedError, match="back, and waits for the next weights"):
        await check("other", Altered(engine, token_ids=[1] * 8))


async def test_publishing_reports_how_far_the_server_is(check, engine, backend):
    class Checked(TorchEngine):
        async def sync(self, source, version):
            await super().sync(source, version)
            await check("server", self)

    async with Checked(sharp_model(1), max_rows=4, max_length=64) as other:
        metrics = await WeightPublisher([other], check=check).publish(backend, 4)
    assert 0.0 < metrics["sync/probe_difference"] < 1e-4
    assert metrics["sync/seconds"] > 0.0


@pytest.mark.parametrize("max_length", [9, 12, 64])
def test_probes_fit_the_longest_row(max_length):
    prompts = probe_prompts(list(range(30)), VOCABULARY, max_length)
    assert all(1 <= len(prompt) <= max_length - 8 for prompt in prompts)
    assert prompts[0] == list(range(30))[-(max_length - 8) :]
    assert set(prompts[1]) <= set(range(VOCABULARY))


def test_the_spread_prompt_reads_the_whole_vocabulary():
    spread = probe_prompts([1], 32_000, 4096)[1]
    assert (spread[0], len(spread)) == (0, 32)
    assert max(later - earlier for earlier, later in itertools.pairwise(spread)) == 1000


def test_rounding_is_allowed_for():
    assert tolerance_for("float32", None) < tolerance_for("bfloat16", None) < tolerance_for("bfloat16", "fp8")
