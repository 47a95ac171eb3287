"""Engine, backend and the library's own forward see the same pictures, and gradients reach what sees them."""

import asyncio

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.packing import sharing_costs
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.model import LoraSettings, ModelSettings, VisionSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.load import load_model, load_tokenizer, save_model
from rollgym.trainer.models.lora import add_lora, is_adapter
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import load_pictures, sees
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import twin_of
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.run.probe import try_pictures
from tests.support.seeing_models import (
    PATCHES,
    PICTURES,
    TOKENIZER,
    own_logprobs,
    patched_model,
    picture,
    row_of,
    seeing_model,
    shown,
)
from tests.support.tiny_models import WeightsOf

ONE, TWO = picture(1), picture(2, side=24)
PROMPTS = [
    [5, ONE, 7],
    [5, TWO, 7],  # the same ids, another picture
    [5, ONE, 7],  # the same of both
    [3, ONE, 8, 9, TWO, 11, ONE, 4],
    [5, 9, 11, 20, 21, 22, 23],
]


def backend_of(model, *, budget=64, temperature=1.0, sharing="auto"):
    settings = OptimizerSettings(tokens_per_micro_batch=budget, weight_decay=0.0, shared_prefixes=sharing)
    return TorchBackend(PolicyHead(model, temperature), settings, Schedule(1e-2, 0, 10, "constant"))


def request(number, parts, *, tokens=6, temperature=1.0, pictures=PICTURES):
    ids, images = shown(parts, pictures)
    return GenerationRequest(
        str(number), ids, SamplingParams(tokens, temperature), seed=number, order=(number,), images=images
    )


FAMILIES = {"llava": (seeing_model, PICTURES), "qwen2.5-vl": (patched_model, PATCHES)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "shares"), [(1.0, True), (0.7, False)])
async def test_engine_backend_and_forward_agree(family, temperature, shares):
    build, pictures = FAMILIES[family]
    model = build()
    requests = [
        request(number, parts, temperature=temperature, pictures=pictures)
        for number, parts in enumerate(PROMPTS)
    ]
    async with TorchEngine(model, max_rows=3, max_length=64, shares_weights=shares) as engine:
        replies = await asyncio.gather(*map(engine.generate, requests))
    rows = [
        row_of(parts, reply.token_ids, pictures=pictures)
        for parts, reply in zip(PROMPTS, replies, strict=True)
    ]
    trained = backend_of(model, temperature=temperature).forward(rows)
    for each, row, reply in zip(trained, rows, replies, strict=True):
        if pictures.token_id in reply.token_ids:
            continue  # the library cannot read what looks like a picture and is none
        begin = len(row.ids) - len(reply.token_ids)
        own = own_logprobs(model, row.ids.tolist(), row.images, temperature)[begin - 1 :]
        # Which rows are in a batch of the engine, and so in which order is summed, is up to when they come.
        assert reply.logprobs == pytest.approx(own, abs=3e-5)
        assert each[begin:].tolist() == pytest.approx(own, abs=1e-5)
    read = [shown(parts, pictures) for parts in PROMPTS]
    first = [own_logprobs(model, [*ids, 6], images)[-1] for ids, images in read]
    assert abs(first[0] - first[1]) > 1e-3
    assert first[0] == first[2]


async def test_a_placeholder_that_the_policy_drew_is_a_token_like_any_other():
    model = seeing_model()
    row = row_of([5, ONE, 7], [PICTURES.token_id, 9, PICTURES.token_id])
    (outputs,) = backend_of(model).forward([row])
    async with TorchEngine(model, max_rows=4, max_length=64) as engine:
        ids, images = row.ids.tolist(), row.images
        told = await engine.generate(GenerationRequest("x", ids, SamplingParams(1), 0, images=images))
    again = row_of([5, ONE, 7], [PICTURES.token_id, 9, PICTURES.token_id, told.token_ids[0]])
    (whole,) = backend_of(model).forward([again])
    assert told.logprobs[0] == pytest.approx(float(whole[-1]), abs=1e-5)
    torch.testing.assert_close(whole[:-1], outputs)


async def test_weights_that_change_meanwhile_are_seen_with():
    model, later = seeing_model(0), seeing_model(1)
    requests = [request(number, parts, tokens=12) for number, parts in enumerate(PROMPTS)]
    async with TorchEngine(model, max_rows=8, max_length=64) as engine:
        waiting = asyncio.gather(*map(engine.generate, requests))
        while not engine.counters.running:
            await asyncio.sleep(0)
        await engine.sync(WeightsOf(later), 1)
        replies = await waiting
    rows = [row_of(parts, reply.token_ids) for parts, reply in zip(PROMPTS, replies, strict=True)]
    for row, reply, new in zip(rows, replies, backend_of(later).forward(rows), strict=True):
        begin = len(row.ids) - len(reply.token_ids)
        for place, version in enumerate(reply.policy_versions):
            if version == 1:
                assert reply.logprobs[place] == pytest.approx(float(new[begin + place]), abs=1e-5)
    assert all(reply.policy_versions[-1] == 1 for reply in replies)


def weighted_loss(micro):
    loss = -(micro.outputs * micro.fields["weight"] * micro.mask).sum() / 20
    return loss, collect({"loss": (loss, torch.zeros(()))})


def rows_to_train():
    replies = [[9, 8, 7], [9, 8, 7, 6], [4], [11, 12, 13], [30, 31]]
    rows = [
        row_of(parts, reply, weight)
        for parts, reply, weight in zip(PROMPTS, replies, (1.0, -0.5, 2.0, 0.3, 1.5), strict=True)
    ]
    # Text that begins alike, beside pictures.
    return [*rows, row_of([5, 9, 11, 20, 21, 22, 23, 24], [3]), row_of([5, 9, 11, 20, 21, 22, 25], [2, 3])]


def stepped(budget, sharing="auto"):
    model = seeing_model()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    report = backend_of(model, budget=budget, sharing=sharing).step(rows_to_train(), weighted_loss)
    moved = {
        name: (each.detach() - before[name]).abs().max().item() for name, each in model.named_parameters()
    }
    return report, moved


@pytest.mark.parametrize("sharing", ["auto", "off"])
def test_steps_do_not_depend_on_micro_batches(sharing):
    report, moved = stepped(10_000, "off")
    again, _ = stepped(12, sharing)
    assert report.gradient_norm == pytest.approx(again.gradient_norm, rel=1e-4)
    assert report.metrics["loss"][0] == pytest.approx(again.metrics["loss"][0], rel=1e-5)
    assert report.tokens.rows == again.tokens.rows
    # Gradients reach the tower, its patches, and what leads from it to the words.
    for part in ("vision_tower.embeddings.patch_embedding", "vision_tower.encoder", "multi_modal_projector"):
        assert any(change > 0 for name, change in moved.items() if part in name), part


def test_a_critic_and_a_reference_see_too():
    model = seeing_model()
    rows = rows_to_train()
    budget = OptimizerSettings().micro_batch_tokens
    reference = FrozenModel(ForwardPass(PolicyHead(twin_of(model), 1.0), budget))
    for mine, theirs in zip(backend_of(model).forward(rows), reference.forward(rows), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    critic = ValueModel(model)
    torch.nn.init.normal_(critic.head.weight)
    settings = OptimizerSettings(tokens_per_micro_batch=64)
    values = TorchBackend(ValueHead(critic), settings, Schedule(1e-2, 0, 10, "constant")).forward(rows)
    assert values[0][-3] != values[1][-4]  # equal ids before them, other pictures


def test_the_tower_is_computed_once_for_equal_pictures():
    model = seeing_model()
    seen = []
    model.base_model.vision_tower.register_forward_hook(
        lambda tower, given, kwargs, made: seen.append(len(given[0] if given else kwargs["pixel_values"])),
        with_kwargs=True,
    )
    backend_of(model, budget=10_000).forward(rows_to_train())
    assert seen == [2]


def test_what_is_written_is_read_by_the_library_and_by_us(tmp_path):
    model = seeing_model()
    save_model(model, PICTURES.processor, tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    ids, images = shown([5, ONE, 7, TWO, 9])
    made = processor(
        text=[TOKENIZER.decode([5]) + processor.image_token], images=[ONE.pixels], return_tensors="pt"
    )
    assert made["input_ids"][0].tolist() == ids[:5]
    assert own_logprobs(theirs.eval(), ids, images) == pytest.approx(
        own_logprobs(model, ids, images), abs=1e-6
    )
    ours = load_model(tmp_path)
    assert sees(ours)
    assert own_logprobs(ours, ids, images) == own_logprobs(theirs, ids, images)
    pictures = load_pictures(tmp_path, load_tokenizer(tmp_path))
    assert isinstance(pictures, PictureProcessor)
    again, read = shown([5, ONE, 7, TWO, 9], pictures)
    assert again == ids
    assert torch.equal(read[1].picture.inputs["pixel_values"], images[1].picture.inputs["pixel_values"])


def test_a_folder_without_a_processor_says_so(tmp_path):
    model = seeing_model()
    save_model(model, TOKENIZER, tmp_path)
    why = load_pictures(tmp_path, TOKENIZER)
    assert (isinstance(why, str) and "cannot be loaded" in why) or "no placeholder" in why


def test_sharing_has_its_costs_for_a_model_that_sees():
    head = PolicyHead(seeing_model(), 1.0)
    assert head.why_not_shared is None
    assert sharing_costs(head, "auto", head.body.device) is not None


def test_adapters_reach_the_tower():
    model = seeing_model()
    add_lora(model, LoraSettings(rank=2), 0)
    moving = {name: each for name, each in model.named_parameters() if is_adapter(name)}
    before = {name: each.detach().clone() for name, each in moving.items()}
    report = backend_of(model).step(rows_to_train(), weighted_loss)
    assert report.applied
    moved = [name for name, each in moving.items() if not each.detach().equal(before[name])]
    assert any("vision_tower" in name for name in moved)
    assert any("language_model" in name for name in moved)


class DoingMore(LlavaForConditionalGeneration):
    """A family that does more with pictures than put their features in the places of tokens."""

    def forward(self, pixel_values=None, **given):
        output = super().forward(pixel_values=pixel_values, **given)
        if pixel_values is not None:
            output.logits = output.logits * 1.5
        return output


@pytest.mark.parametrize("does_more", [False, True])
async def test_a_family_that_does_more_is_found_before_the_run(does_more):
    model = seeing_model()
    if does_more:
        model.__class__ = DoingMore
    renderer = ChatRenderer(TOKENIZER, pictures=PICTURES)
    settings = RunSettings(
        steps=1, tasks=[{"env_id": "FrozenLake-v0"}], model={"max_length": 64}, rollout={"max_new_tokens": 2}
    )
    made_to_see = settings.model_copy(update={"model": ModelSettings(max_length=64, vision=VisionSettings())})
    async with TorchEngine(model, max_rows=4, max_length=64) as engine:
        found = await try_pictures(settings, model, engine, renderer)
        if not does_more:
            assert found is PICTURES
            return
        assert "reads them in a way that is not known here: log-probabilities" in found
        with pytest.raises(ConfigError, match="do not agree"):
            await try_pictures(made_to_see, model, engine, renderer)
