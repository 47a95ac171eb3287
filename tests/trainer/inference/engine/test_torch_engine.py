"""The embedded engine against the library's own forward pass and generation."""

import asyncio
import threading

import pytest
import torch

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.weights import load_weights
from tests.support.tiny_models import VOCABULARY, WeightsOf, reference_logprobs, sharp_model

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [3, 4, 5], [2, 2]]


def requests_of(prompts, sampling, first_seed=0):
    return [
        GenerationRequest(f"r{first_seed + place}", prompt, sampling, first_seed + place, (place,))
        for place, prompt in enumerate(prompts)
    ]


@pytest.fixture
def model():
    return sharp_model()


@pytest.fixture
async def engine(model):
    async with TorchEngine(model, max_rows=4, max_length=48) as running:
        yield running


async def test_greedy_replies_are_those_of_the_library(model, engine):
    results = await engine.generate_together(requests_of(PROMPTS, SamplingParams(8, temperature=0.0)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :]
        assert result.token_ids == expected.tolist()
        assert result.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampled_distribution(model, engine, temperature):
    sampling = SamplingParams(10, temperature=temperature)
    results = await asyncio.gather(*map(engine.generate, requests_of(PROMPTS, sampling)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = reference_logprobs(model, prompt + result.token_ids, temperature)[len(prompt) - 1 :]
        assert result.logprobs == pytest.approx(expected, abs=2e-4)


async def test_truncated_distributions_are_renormalised(model, engine):
    sampling = SamplingParams(1, top_k=3)
    (result,) = await engine.generate_together(requests_of([[3, 4]], sampling))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4]])).logits[0, -1]
    best = logits.topk(3)
    assert result.token_ids[0] in best.indices.tolist()
    place = best.indices.tolist().index(result.token_ids[0])
    assert result.logprobs[0] == pytest.approx(best.values.log_softmax(-1)[place].item(), abs=1e-4)


async def test_a_reply_does_not_depend_on_who_shares_its_batch(model, engine):
    sampling = SamplingParams(12)
    alone = [(await engine.generate_together([request]))[0] for request in requests_of(PROMPTS, sampling)]
    together = await engine.generate_together(requests_of(PROMPTS, sampling))
    mixed = await asyncio.gather(*map(engine.generate, requests_of(PROMPTS, sampling)))
    for one, other, third in zip(alone, together, mixed, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


async def test_equal_calls_are_bitwise_equal(engine):
    sampling = SamplingParams(12)
    first = await engine.generate_together(requests_of(PROMPTS, sampling))
    second = await engine.generate_together(requests_of(PROMPTS, sampling))
    assert [(r.token_ids, r.logprobs) for r in first] == [(r.token_ids, r.logprobs) for r in second]


async def test_a_stop_token_ends_the_reply_and_belongs_to_it(engine):
    free = (await engine.generate_together(requests_of([[3, 4, 5]], SamplingParams(8, 0.0))))[0].token_ids
    stop = free[3]
    expected = free[: free.index(stop) + 1]
    (result,) = await engine.generate_together(
        requests_of([[3, 4, 5]], SamplingParams(8, 0.0, stop_token_ids=(stop,)))
    )
    assert (result.token_ids, result.finish_reason) == (expected, "stop")
    assert len(result.logprobs) == len(result.policy_versions) == len(expected)


async def test_requests_join_and_leave_while_others_run(engine):
    """More requests than rows, of very different lengths: all are answered as if alone."""
    lengths = [1, 20, 3, 9, 2, 15, 1, 5]
    prompts = [[place + 2] * (place + 1) for place in range(len(lengths))]
    requests = [
        GenerationRequest(f"r{place}", prompt, SamplingParams(length), 100 + place)
        for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    results = await asyncio.gather(*map(engine.generate, requests))
    for request, result in zip(requests, results, strict=True):
        (alone,) = await engine.generate_together([request])
        assert result.token_ids == alone.token_ids
        assert len(result.token_ids) == request.sampling.max_new_tokens


async def test_weights_that_change_in_flight_stamp_each_token(model):
    async with TorchEngine(model, max_rows=2, max_length=64) as engine:
        reply = asyncio.create_task(engine.generate(requests_of([[3, 4]], SamplingParams(40))[0]))
        while engine.counters.tokens_generated < 3:
            await asyncio.sleep(0)
        other = sharp_model(seed=1)
        await engine.sync(WeightsOf(other), version=1)
        result = await reply
        assert engine.version == 1
        versions = result.policy_versions
        assert versions == sorted(versions)
        assert {0, 1} == set(versions)
        # What was drawn afterwards is what the new weights say of the whole row.
        change = versions.index(1)
        expected = reference_logprobs(other, [3, 4, *result.token_ids])[1:]
        assert result.logprobs[change:] == pytest.approx(expected[change:], abs=2e-4)


async def test_training_on_the_original_does_not_change_the_engine(model, engine):
    before = await engine.generate_together(requests_of(PROMPTS, SamplingParams(4, 0.0)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after = await engine.generate_together(requests_of(PROMPTS, SamplingParams(4, 0.0)))
    assert [r.token_ids for r in before] == [r.token_ids for r in after]


async def test_half_an_update_is_refused(model):
    with pytest.raises(ValueError, match="missing"):
        load_weights(model, [])
    with pytest.raises(ValueError, match="unknown"):
        load_weights(model, [*model.named_parameters(), ("no.such", torch.zeros(1))])


async def test_a_cancelled_request_frees_its_row(engine):
    requests = requests_of([[3]] * 4, SamplingParams(40))
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.02)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    result = await asyncio.wait_for(engine.generate(requests_of([[5]], SamplingParams(2), 50)[0]), 10)
    assert len(result.token_ids) == 2


async def test_a_request_that_is_cancelled_in_a_pause_frees_its_row_before_anything_goes_on(engine):
    running = [
        asyncio.create_task(engine.generate(each)) for each in requests_of([[3], [4]], SamplingParams(40))
    ]
    await started(engine, 2)
    await engine.pause("keep")
    running[0].cancel()
    async with asyncio.timeout(10):
        while engine.counters.running == 2:
            await asyncio.sleep(0)
    await engine.resume()
    assert len((await running[1]).token_ids) == 40


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty prompt"), ([1] * 45, "pass the longest row of 48")]
)
async def test_prompts_that_cannot_be_answered_are_refused(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        await engine.generate(requests_of([prompt], SamplingParams(8))[0])


async def test_every_token_can_be_drawn(engine):
    """Draws follow the distribution: a hot policy over 40 tokens shows nearly all of them."""
    sampling = SamplingParams(1, temperature=50.0)
    results = await engine.generate_together(requests_of([[3]] * 400, sampling))
    assert len({result.token_ids[0] for result in results}) > 0.9 * VOCABULARY


@pytest.mark.parametrize("broken", ["advance", "recompute"])
async def test_an_engine_that_broke_answers_everybody_then_and_later(model, monkeypatch, broken):
    def fail(*_):
        raise RuntimeError("out of memory")

    async with TorchEngine(model, max_rows=2, max_length=64) as engine, asyncio.timeout(30):
        monkeypatch.setattr(engine._batch, broken, fail)
        weights = WeightsOf(model)
        requests = requests_of([[3, 4], [5], [6]], SamplingParams(4))
        ends = await asyncio.gather(
            *(engine.generate(request) for request in requests),
            engine.sync(weights, version=1),
            return_exceptions=True,
        )
        # Weights are taken first: only where that fails are they refused.
        assert [str(end) for end in ends[:3]] == ["out of memory"] * 3
        assert str(ends[3]) == ("None" if broken == "advance" else "out of memory")
        with pytest.raises(RuntimeError, match="has failed before"):
            await engine.sync(weights, version=2)
        with pytest.raises(RuntimeError, match="has failed before"):
            await engine.generate(requests[0])


async def test_an_engine_that_breaks_as_it_ends_replies_answers_who_asked_for_that(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    async with TorchEngine(model, max_rows=2, max_length=64) as engine, asyncio.timeout(30):
        reply = asyncio.create_task(engine.generate(requests_of([[3]], SamplingParams(60))[0]))
        await started(engine, 1)
        monkeypatch.setattr(engine._batch, "take", fail)
        ends = await asyncio.gather(engine.abort(), reply, return_exceptions=True)
        assert [str(end) for end in ends] == ["out of memory"] * 2


async def started(engine, count):
    while engine.counters.running < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", ["abort", "keep", "recompute"])
async def test_a_pause_stands_still_and_what_was_under_way_goes_on(model, engine, mode):
    requests = requests_of([[3, 4], [5]], SamplingParams(40))
    undisturbed = [(await engine.generate_together([request]))[0].token_ids for request in requests]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await started(engine, 2)
    await engine.pause(mode)
    before = engine.counters.tokens_generated
    late = asyncio.create_task(engine.generate(requests_of([[6]], SamplingParams(2), 9)[0]))
    await engine.pause(mode)
    # New weights are taken in a pause, too.
    await engine.sync(WeightsOf(model), version=1)
    assert engine.counters.tokens_generated == before
    assert not late.done()
    await engine.resume()
    assert [(await reply).token_ids for reply in running] == undisturbed
    assert set((await late).policy_versions) == {1}


async def test_a_waiting_pause_lets_replies_end_and_takes_no_new_ones(engine):
    first = asyncio.create_task(engine.generate(requests_of([[3, 4]], SamplingParams(20))[0]))
    await started(engine, 1)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(requests_of([[6]], SamplingParams(2), 9)[0]))
    await asyncio.wait_for(pausing, 30)
    assert len((await first).token_ids) == 20
    assert not late.done()
    await engine.resume()
    assert len((await asyncio.wait_for(late, 30)).token_ids) == 2


async def test_a_pause_that_is_cancelled_before_it_is_quiet_is_none(engine):
    first = asyncio.create_task(engine.generate(requests_of([[3, 4]], SamplingParams(20))[0]))
    await started(engine, 1)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    late = engine.generate(requests_of([[6]], SamplingParams(2), 9)[0])
    assert len((await asyncio.wait_for(late, 30)).token_ids) == 2
    assert len((await first).token_ids) == 20


async def test_a_pause_that_is_cancelled_leaves_the_one_before(engine):
    first = asyncio.create_task(engine.generate(requests_of([[3, 4]], SamplingParams(20))[0]))
    await started(engine, 1)
    await engine.pause("keep")
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    drawn = engine.counters.tokens_generated
    await asyncio.sleep(0.1)
    assert engine.counters.tokens_generated <= drawn + 1, "the step under way may have ended"
    await engine.resume()
    assert len((await asyncio.wait_for(first, 30)).token_ids) == 20


async def test_aborted_replies_have_what_was_drawn(model):
    async with TorchEngine(model, max_rows=2, max_length=48) as engine:
        requests = requests_of([[3, 4], [5], [6]], SamplingParams(40))
        whole = (await engine.generate_together(requests[:1]))[0]
        replies = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.counters.tokens_generated < 44:
            await asyncio.sleep(0)
        assert await engine.abort(["r0", "r2", "unknown"]) == 2
        first, waiting = await replies[0], await replies[2]
        assert first.finish_reason == waiting.finish_reason == "abort"
        assert first.token_ids == whole.token_ids[: len(first.token_ids)]
        assert 0 < len(first.token_ids) < 40
        assert waiting.token_ids == []
        assert (await replies[1]).finish_reason == "length"
        assert await engine.abort() == 0


class SlowWeights(WeightsOf):
    """Weights that are read only once they may be."""

    def __init__(self, model):
        super().__init__(model)
        self.asked, self.may = threading.Event(), threading.Event()

    def parameters(self):
        self.asked.set()
        assert self.may.wait(60)
        yield from super().parameters()


async def test_an_abort_is_answered_that_comes_while_an_idle_engine_takes_weights(engine):
    weights = SlowWeights(sharp_model(1))
    async with asyncio.timeout(60):
        taken = asyncio.ensure_future(engine.sync(weights, 1))
        await asyncio.to_thread(weights.asked.wait)
        aborted = asyncio.ensure_future(engine.abort())
        await asyncio.sleep(0)
        weights.may.set()
        assert await aborted == 0
        await taken


async def test_an_engine_that_is_closed_while_weights_wait_answers_whoever_brings_them(engine):
    first, second = SlowWeights(sharp_model(1)), SlowWeights(sharp_model(2))
    async with asyncio.timeout(60):
        taken = [asyncio.ensure_future(engine.sync(weights, 1)) for weights in (first, second)]
        await asyncio.to_thread(first.asked.wait)
        first.may.set()
        await engine.close()
        assert all(
            isinstance(each, BaseException) for each in await asyncio.gather(*taken, return_exceptions=True)
        )


async def test_an_engine_that_is_closed_in_a_pause_leaves_nobody_waiting(model):
    engine = TorchEngine(model, max_rows=2, max_length=48)
    reply = asyncio.create_task(engine.generate(requests_of([[3]], SamplingParams(40))[0]))
    await started(engine, 1)
    await engine.pause("keep")
    await engine.close()
    with pytest.raises(asyncio.CancelledError):
        await reply


async def test_health_and_counters(model, engine, monkeypatch):
    assert (await engine.health()).ready
    await asyncio.gather(*map(engine.generate, requests_of([[3, 4], [5]], SamplingParams(3))))
    counters = engine.counters
    assert (counters.requests, counters.prompt_tokens, counters.tokens_generated) == (2, 3, 6)
    monkeypatch.setattr(engine._batch, "advance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await engine.generate(requests_of([[3]], SamplingParams(3), 7)[0])
    assert not (await engine.health()).ready
    with pytest.raises(RuntimeError, match="has failed before"):
        await engine.pause("wait")


async def test_an_engine_that_shares_weights_is_given_no_others(model):
    async with TorchEngine(model, max_rows=2, max_length=48, shares_weights=True) as engine:
        assert engine._model is model
        await engine.sync(WeightsOf(model), version=1)
        assert engine.version == 1
        with pytest.raises(ValueError, match="shares the weights of a model, and is given those of another"):
            await engine.sync(WeightsOf(sharp_model()), version=2)


async def test_nothing_is_drawn_while_shared_weights_change(model):
    async with TorchEngine(model, max_rows=2, max_length=64, shares_weights=True) as engine:
        reply = asyncio.create_task(engine.generate(requests_of([[3, 4]], SamplingParams(40))[0]))
        while engine.counters.tokens_generated < 3:
            await asyncio.sleep(0)
        async with engine.standing_still():
            drawn = engine.counters.tokens_generated
            with torch.no_grad():
                for parameter, other in zip(model.parameters(), sharp_model(1).parameters(), strict=True):
                    parameter.copy_(other)
            await engine.sync(WeightsOf(model), version=1)
            assert engine.counters.tokens_generated == drawn
        result = await reply
        change = result.policy_versions.index(1)
        assert change == drawn
        expected = reference_logprobs(model, [3, 4, *result.token_ids])[1:]
        assert result.logprobs[change:] == pytest.approx(expected[change:], abs=2e-4)


def held_numbers(engine):
    """Numbers of keys and values that an engine holds."""
    batches = [each for each in (engine._batch, engine._alone) if each is not None]
    return sum(
        held.numel() for batch in batches for layer in batch._slots.cache._layers for held in layer.tensors
    )


@pytest.mark.parametrize("updated", [True, False])
async def test_keys_and_values_are_given_back_while_the_engine_sleeps(model, updated):
    """A reply that is under way goes on as if nothing had happened, with the weights that there are then."""
    async with TorchEngine(model, max_rows=3, max_length=64, shares_weights=True) as engine:
        await engine.generate_together(requests_of([[5, 6], [7]], SamplingParams(4)))
        replies = [
            asyncio.create_task(engine.generate(each))
            for each in requests_of([[3, 4], [9, 8, 7]], SamplingParams(40))
        ]
        while engine.counters.tokens_generated < 20:
            await asyncio.sleep(0)
        assert held_numbers(engine)
        async with engine.standing_still(asleep=True):
            assert held_numbers(engine) == 0
            if updated:
                await engine.sync(WeightsOf(model), version=1)
        for prompt, reply in zip([[3, 4], [9, 8, 7]], await asyncio.gather(*replies), strict=True):
            expected = reference_logprobs(model, [*prompt, *reply.token_ids])[len(prompt) - 1 :]
            assert reply.logprobs == pytest.approx(expected, abs=2e-4)
            assert (1 in reply.policy_versions) == updated
        (alone,) = await engine.generate_together(requests_of([[3, 4]], SamplingParams(40)))
        assert alone.token_ids


async def test_a_reply_that_nobody_waits_for_any_more_leaves_an_engine_that_sleeps(model):
    async with TorchEngine(model, max_rows=2, max_length=64, shares_weights=True) as engine:
        gone, stays = (
            asyncio.create_task(engine.generate(each))
            for each in requests_of([[3, 4], [9, 8, 7]], SamplingParams(40))
        )
        while engine.counters.tokens_generated < 8:
            await asyncio.sleep(0)
        async with engine.standing_still(asleep=True):
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            late = asyncio.create_task(engine.generate(requests_of([[5]], SamplingParams(3))[0]))
            await asyncio.sleep(0)
        replies = await asyncio.gather(stays, late)
        assert [len(reply.token_ids) for reply in replies] == [40, 3]


async def test_an_engine_that_never_drew_sleeps_and_wakes(model):
    async with TorchEngine(model, max_rows=2, max_length=64, shares_weights=True) as engine:
        async with engine.standing_still(asleep=True):
            pass
        reply = await engine.generate(requests_of([[3, 4]], SamplingParams(4))[0])
        assert len(reply.token_ids) == 4
