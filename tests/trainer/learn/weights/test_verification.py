"""Servers that took the weights are believed when their log-probabilities say so."""

import dataclasses
import itertools
import math

import pytest
import torch

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.errors import WeightsReleasedError, WrongWeightsError
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.learn.weights.verification import (
    Tolerance,
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
    return begun(backend, Tolerance(1e-3))


def begun(backend, tolerance):
    prompts = probe_prompts([3, 4, 5, 6], VOCABULARY, 64, tolerance)
    made = WeightCheck(prompts, TEMPERATURE, tolerance, seed=1, max_length=64)
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
    quantised, plain = (begun(backend, Tolerance(1.0, measure)) for measure in ("mean", "largest"))
    one = Shifted(engine, tokens=1, by=5.0)
    assert await quantised("server", one) == pytest.approx(5.0, abs=1e-3)
    assert quantised.largest == pytest.approx(5.0, abs=1e-3)
    with pytest.raises(WrongWeightsError, match="up to 5 from"):
        await plain("server", one)
    with pytest.raises(WrongWeightsError, match="on average 2 from"):
        await quantised("server", Shifted(engine, tokens=8, by=2.0))


async def test_a_server_that_is_back_is_compared_with_what_was_computed(check, engine):
    await check("first", engine)
    await check.end()
    assert await check("back", engine) < 1e-4
    with pytest.raises(WeightsReleasedError, match="back, and waits for the next weights"):
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
    prompts = probe_prompts(list(range(30)), VOCABULARY, max_length, Tolerance(1e-3))
    assert all(1 <= len(prompt) <= max_length - 8 for prompt in prompts)
    assert prompts[0] == list(range(30))[-(max_length - 8) :]
    assert set(prompts[1]) <= set(range(VOCABULARY))


@pytest.mark.parametrize("max_length", [2, 12, 64])
async def test_rows_that_are_short_have_short_replies(backend, engine, max_length):
    tolerance = tolerance_for("bfloat16", None)
    asked = []

    class Noting(Altered):
        async def generate(self, request):
            asked.append(len(request.prompt_ids) + request.sampling.max_new_tokens)
            return await self._engine.generate(request)

    prompts = probe_prompts(list(range(3, 30)), VOCABULARY, max_length, tolerance)
    check = WeightCheck(prompts, TEMPERATURE, tolerance, seed=1, max_length=max_length)
    check.begin(1, backend)
    await check("server", Noting(engine))
    assert max(asked) <= max_length


async def test_in_16_bits_single_tokens_may_be_far_apart_and_most_may_not(backend, engine):
    check = begun(backend, tolerance_for("bfloat16", None))
    assert await check("server", Shifted(engine, tokens=8, by=5.0)) == pytest.approx(5.0, abs=1e-3)
    assert await check("server", Shifted(engine, tokens=16, by=0.09)) < 0.1
    with pytest.raises(
        WrongWeightsError, match=r"\d+ of \d+ log-probabilities of a probe are more than 0\.1 from"
    ):
        await check("server", Shifted(engine, tokens=16, by=0.11))


async def test_in_16_bits_what_no_prompt_shows_alone_is_found_in_both(backend, engine):
    check = begun(backend, tolerance_for("bfloat16", None))
    assert await check("server", Shifted(engine, tokens=11, by=5.0)) == pytest.approx(5.0, abs=1e-3)
    with pytest.raises(WrongWeightsError, match=r"96 of 128 log-probabilities .* and 93 may be"):
        await check("server", Shifted(engine, tokens=12, by=5.0))


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
async def test_in_16_bits_one_token_without_a_number_is_a_fault(backend, engine, wrong):
    check = begun(backend, tolerance_for("bfloat16", None))

    class Broken(Altered):
        async def generate(self, request):
            reply = await self._engine.generate(request)
            first = request.order[0] == request.order[1] == 0
            return dataclasses.replace(reply, logprobs=[wrong, *reply.logprobs[1:]]) if first else reply

    with pytest.raises(WrongWeightsError, match="up to inf"):
        await check("server", Broken(engine))


async def test_in_16_bits_replies_of_one_token_are_compared_too(backend, engine):
    """A policy that ends every reply at once draws too few tokens for a chance of one in ten million."""
    tolerance = tolerance_for("bfloat16", None)
    check = WeightCheck([[3, 4]], TEMPERATURE, tolerance, seed=1, max_length=3)
    check.begin(1, backend)
    assert await check("server", engine) < 1e-4
    with pytest.raises(WrongWeightsError, match="4 of 4"):
        await check("server", Shifted(engine, tokens=1, by=0.2))


async def test_in_16_bits_a_prompt_whose_embedding_did_not_arrive_is_found(backend, engine, model):
    """Half of the vocabulary is the old one at the server: a conversation may never read it."""
    other = sharp_model()
    with torch.no_grad():
        other.get_input_embeddings().weight[VOCABULARY // 4 :] = 0.0
    await engine.sync(WeightsOf(other), 1)
    with pytest.raises(WrongWeightsError, match="of 64 log-probabilities"):
        await begun(backend, tolerance_for("bfloat16", None))("server", engine)


def test_the_spread_prompt_reads_the_whole_vocabulary():
    spread = probe_prompts([1], 32_000, 4096, Tolerance(1e-3))[1]
    assert (spread[0], len(spread)) == (0, 32)
    assert max(later - earlier for earlier, later in itertools.pairwise(spread)) == 1000


def test_rounding_is_allowed_for():
    exact, rounded, quantised = (
        tolerance_for(*each) for each in (("float32", None), ("bfloat16", None), ("bfloat16", "fp8"))
    )
    assert exact.nats < rounded.nats < quantised.nats
    assert [each.measure for each in (exact, rounded, quantised)] == ["largest", "most", "mean"]
    assert tolerance_for("bfloat16", None, 0.5) == Tolerance(0.5, "most")
    assert tolerance_for("auto", None) == rounded
