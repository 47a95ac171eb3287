"""Rows in slots: what is computed once, what a decoding step launches and allocates, and that nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.decoding import ActiveBatch
from rollgym.trainer.inference.engine.slot_batch import SlotBatch
from rollgym.trainer.inference.engine.slots import SlotModel, rounded, why_no_slots
from rollgym.trainer.models.weights import without_chance
from tests.support.current_families import FAMILIES, model_of
from tests.support.model_families import config_of, random_model
from tests.support.tiny_models import VOCABULARY, reference_logprobs, sharp_model


def request_of(prompt, tokens, seed=0, **more):
    return GenerationRequest(f"r{seed}", list(prompt), SamplingParams(tokens, **more), seed)


def long_prompt(tokens, seed):
    return np.random.default_rng(seed).integers(2, VOCABULARY, tokens).tolist()


def played(batch, requests):
    """The replies of requests that come together, with what left beside them."""
    waiting = list(range(len(requests)))
    replies = {}
    admitted = requests
    while waiting:
        finished = batch.advance(admitted, 0)
        admitted = []
        replies |= {waiting[row]: reply for row, reply in finished}
        gone = {row for row, _ in finished}
        waiting = [number for row, number in enumerate(waiting) if row not in gone]
    return [replies[number] for number in range(len(requests))]


class Reads:
    """Counts the tokens that a model reads, padding included."""

    def __init__(self, model):
        self.tokens = 0
        model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, __, given):
        self.tokens += given["input_ids"].numel()

    def since(self):
        tokens, self.tokens = self.tokens, 0
        return tokens


def assert_exact(model, request, reply):
    expected = reference_logprobs(model, request.prompt_ids + reply.token_ids, request.sampling.temperature)
    assert reply.logprobs == pytest.approx(expected[len(request.prompt_ids) - 1 :], abs=2e-4)


def test_members_of_a_group_read_their_prompt_once():
    model = sharp_model()
    batch, reads = SlotBatch(model, 8, 64), Reads(model)
    requests = [request_of(long_prompt(30, 0), 1, seed) for seed in range(8)]
    replies = played(batch, requests)
    assert reads.since() == 30
    for request, reply in zip(requests, replies, strict=True):
        assert_exact(model, request, reply)
    reads.since()
    # One that comes later reads its last token, behind which it draws.
    (late,) = played(batch, [request_of(long_prompt(30, 0), 1, 9)])
    assert reads.since() == 1
    assert_exact(model, request_of(long_prompt(30, 0), 1, 9), late)


def test_examples_of_every_prompt_are_read_once():
    model = sharp_model()
    batch, reads = SlotBatch(model, 8, 64), Reads(model)
    examples = long_prompt(40, 0)
    requests = [request_of(examples + long_prompt(6, 1 + number), 4, number) for number in range(6)]
    replies = played(batch, requests)
    assert reads.since() == 46 + 5 * 6 + 6 * 3
    for request, reply in zip(requests, replies, strict=True):
        assert_exact(model, request, reply)


def test_the_next_turn_reads_what_is_new_in_it():
    model = sharp_model()
    batch, reads = SlotBatch(model, 4, 64), Reads(model)
    prompts = [long_prompt(20 + number, number) for number in range(4)]
    for turn in range(3):
        requests = [request_of(prompt, 3, 10 * turn + number) for number, prompt in enumerate(prompts)]
        replies = played(batch, requests)
        # A prompt reads on from what stands there: the last token of a reply was drawn and never read.
        assert reads.since() == (4 * 23 if turn == 0 else 4 * (1 + 2)) + 4 * 2
        for request, reply in zip(requests, replies, strict=True):
            assert_exact(model, request, reply)
        reads.since()
        prompts = [[*prompt, *reply.token_ids, 2, 3] for prompt, reply in zip(prompts, replies, strict=True)]


def test_what_was_read_with_other_weights_is_read_again():
    model = sharp_model()
    batch, reads = SlotBatch(model, 4, 64), Reads(model)
    played(batch, [request_of(long_prompt(30, 0), 2)])
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), sharp_model(1).parameters(), strict=True):
            parameter.copy_(other)
    batch.recompute()
    reads.since()
    request = request_of(long_prompt(30, 0), 2, 1)
    (reply,) = played(batch, [request])
    assert reads.since() == 31
    assert_exact(model, request, reply)


def test_a_batch_that_does_not_remember_computes_everything_anew():
    model = sharp_model()
    batch, reads = SlotBatch(model, 4, 64, remembers=False), Reads(model)
    requests = [request_of(long_prompt(30, number // 2), 3, number) for number in range(4)]
    first = played(batch, requests)
    tokens = reads.since()
    again = played(batch, requests)
    assert reads.since() == tokens == 2 * 30 + 4 * 2
    assert [each.logprobs for each in first] == [each.logprobs for each in again]


def test_a_row_of_no_numbers_spoils_nobody_who_comes_after_it():
    model = long_model()
    batch = SlotBatch(model, 2, 64)
    with torch.no_grad():
        model.get_input_embeddings().weight[39] = torch.nan
    (spoilt,) = played(batch, [request_of([39] * 30, 2)])
    assert np.isnan(spoilt.logprobs).all()
    for seed in range(2):
        request = request_of([3, 4, 5, 6 + seed], 6, seed, top_k=4)
        (reply,) = played(batch, [request])
        # Where it is drawn itself, what follows is not finite either.
        assert 39 not in reply.token_ids
        assert np.isfinite(reply.logprobs).all()


class Play:
    """What a run does with a batch, and what must hold of each reply."""

    def __init__(self, captures):
        self.model = sharp_model()
        self.batch = SlotBatch(self.model, 8, 64)
        self.batch._slots.captures = captures
        self.rows = []
        self.past = [[]]
        self.count = 0

    def admit(self, shares, new, tokens):
        past = self.past[shares % len(self.past)]
        self.count += 1
        prompt = [*past, *long_prompt(new, self.count)][:50]
        return request_of(prompt, min(tokens, 64 - len(prompt)), self.count)

    def advance(self, admitted):
        self.rows += admitted
        if not self.rows:
            return
        finished = self.batch.advance(admitted, 0)
        for row, reply in finished:
            self.left(self.rows[row], reply)
        gone = {row for row, _ in finished}
        self.rows = [request for row, request in enumerate(self.rows) if row not in gone]

    def abort(self, row):
        (reply,) = self.batch.take([row])
        self.left(self.rows.pop(row), reply)

    def left(self, request, reply):
        assert_exact(self.model, request, reply)
        self.past.append([*request.prompt_ids, *reply.token_ids])


def test_rows_may_be_moved_between_a_step_and_those_that_join_it():
    play = Play(captures=True)
    play.advance([play.admit(0, 5, tokens) for tokens in (2, 7, 7, 7, 7, 7)])
    play.advance([])  # the first leaves, and a step of six slots goes on without an exchange
    play.advance([play.admit(0, 5, 3) for _ in range(3)])  # for which there must be more slots
    while play.rows:
        play.advance([])


@pytest.mark.parametrize("captures", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.integers(1, 9)), max_size=4),
            st.sampled_from(["go on", "go on", "abort", "weights"]),
        ),
        max_size=14,
    )
)
def test_whoever_comes_and_goes_each_row_has_its_own_log_probabilities(captures, steps):
    """Also with steps of rounded shapes, as they are recorded on a device: some slots are nobody's then."""
    play = Play(captures)
    for arrivals, event in steps:
        room = 8 - len(play.rows)
        play.advance([play.admit(*arrival) for arrival in arrivals[:room]])
        if event == "abort" and play.rows:
            play.abort(len(play.rows) // 2)
        elif event == "weights":
            play.batch.recompute()
    while play.rows:
        play.advance([])


def long_model(layers=3):
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    # Weights that are the same in any order of the tests.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return without_chance(Qwen2ForCausalLM(config)).eval()


def decoding_step(batch, rows, tokens=600):
    """The events of one decoding step of some rows behind prompts of some length."""
    batch.advance([request_of(long_prompt(tokens, seed), 9, seed) for seed in range(rows)], 0)
    batch.advance([], 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        batch.advance([], 0)
    return profiled.events()


_NOTHING_TO_LAUNCH = {
    f"aten::{name}"
    for name in (
        "alias", "detach_", "empty", "expand", "flatten", "lift_fresh", "reshape", "resolve_conj", "resolve_neg",
        "select", "slice", "to", "transpose", "unbind", "unsqueeze", "view",
    )
}  # fmt: skip


def launches(events):
    """Operators that are called by no other and do more than look at a tensor another way."""
    return sum(
        event.name.startswith("aten::") and event.cpu_parent is None and event.name not in _NOTHING_TO_LAUNCH
        for event in events
    )


def test_a_decoding_step_launches_as_much_for_many_rows_as_for_few():
    layers = {}
    for depth in (2, 3):
        model = long_model(depth)
        few, many = (launches(decoding_step(SlotBatch(model, 16, 1024), rows, tokens=40)) for rows in (2, 12))
        assert few == many
        layers[depth] = many
    in_a_layer = layers[3] - layers[2]
    assert in_a_layer <= 36
    assert layers[2] - 2 * in_a_layer <= 36


def test_nothing_in_a_decoding_step_waits_for_the_host():
    slots = SlotModel(long_model(), 64)
    slots.resize(4, 64)
    tokens = torch.tensor([[3, 4, 5, 6], [0, 0, 0, 64], [0, 0, 0, 0]])
    with torch.inference_mode():
        slots.step(tokens, 64)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            slots.step(tokens, 64)
    waits = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
    assert not waits & {event.name for event in profiled.events()}


def test_no_decoding_step_allocates_anything_of_the_size_of_what_is_held():
    model = long_model()
    rows = 12
    held = rows * 600 * 2 * 8 * 4  # keys of one layer, in bytes

    def largest(batch):
        return max(event.self_cpu_memory_usage for event in decoding_step(batch, rows))

    assert largest(SlotBatch(model, 16, 1024)) < held / 4
    assert largest(ActiveBatch(model)) > held


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_today_are_decoded_in_slots(family):
    assert why_no_slots(model_of(family), 64) is None


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bloom", "it cannot compute them"),
        ("opt", "made by its whole forward"),
        ("gpt_neo", "not what it computes of whole rows"),
    ],
)
def test_families_that_make_something_else_of_masks_are_not(family, why):
    assert why in why_no_slots(random_model(config_of(family), torch.float32), 64)


def test_sizes_repeat_and_are_at_most_half_more():
    sizes = [rounded(number) for number in range(1, 500)]
    assert all(number <= size <= 1.5 * number for number, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need such a device")
def test_recorded_steps_draw_what_launched_ones_do():
    model = sharp_model().to("cuda")
    requests = [request_of(long_prompt(20 + number, number), 12, number) for number in range(5)]
    recorded, launched = SlotBatch(model, 8, 64), SlotBatch(model, 8, 64)
    launched._slots._captured = None
    for one, other in zip(played(recorded, requests), played(launched, requests), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert recorded._slots._captured._recordings
