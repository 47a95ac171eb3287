"""What replies must look like, in the embedded engine: they do, and the record has what they were drawn with."""

import asyncio
import json
import sys

import jsonschema
import pytest
import torch

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams, StructuredOutput
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model, build_tiny_tokenizer
from tests.support.tiny_models import WeightsOf

SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["Left", "Right"]}, "sure": {"type": "boolean"}},
    "required": ["move", "sure"],
    "additionalProperties": False,
}
MOVE = StructuredOutput("json", json.dumps(SCHEMA))
TOKENIZER = build_tiny_tokenizer()
END = TOKENIZER.eos_token_id


def tiny(longest):
    shape = TinyPolicySettings(len(TOKENIZER), hidden_size=32, layers=1, heads=2, max_length=longest)
    return build_tiny_model(shape, 0)


def request(structured, seed=0, *, longest=200, **sampling):
    params = SamplingParams(longest, stop_token_ids=(END,), structured=structured, **sampling)
    return GenerationRequest(f"r{seed}", TOKENIZER.encode("play"), params, seed)


def text_of(result):
    return TOKENIZER.decode(result.token_ids, skip_special_tokens=True)


@pytest.fixture
async def engine():
    pytest.importorskip("llguidance")
    model = tiny(512)
    async with TorchEngine(model, max_rows=4, max_length=400, tokenizer=TOKENIZER) as running:
        running.model = model
        yield running


async def test_replies_fit_a_schema_and_those_beside_them_are_free(engine):
    asked = [request(MOVE, seed) for seed in range(6)]
    free = request(None, 100, longest=20)
    alone = await engine.generate(free)
    *results, beside = await asyncio.gather(*map(engine.generate, asked), engine.generate(free))
    assert beside.token_ids == alone.token_ids
    whole = [result for result in results if result.finish_reason == "stop"]
    assert whole, "some of them come to their end"
    for result in whole:
        jsonschema.validate(json.loads(text_of(result)), SCHEMA)
        assert result.token_ids[-1] == END


async def test_log_probabilities_are_those_of_the_masked_distribution(engine):
    shapes = StructuredOutput("regex", "Left|Right")
    result = await engine.generate(request(shapes, 3, temperature=0.7))
    assert text_of(result) in ("Left", "Right")
    ids = TOKENIZER.encode("play") + result.token_ids
    with torch.inference_mode():
        logits = engine.model(torch.tensor([ids])).logits[0].float() / 0.7
    expected = []
    for place, token in enumerate(result.token_ids):
        said = TOKENIZER.decode(result.token_ids[:place], skip_special_tokens=True)
        fits = [
            each
            for each in range(len(TOKENIZER))
            if any(whole.startswith(said + (TOKENIZER.decode([each]) or "?")) for whole in ("Left", "Right"))
            and each not in TOKENIZER.all_special_ids
        ]
        fits = fits or [END]
        row = logits[len(TOKENIZER.encode("play")) + place - 1]
        expected.append(float(row[token] - torch.logsumexp(row[fits], 0)))
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


async def test_batches_that_must_be_reproducible_are(engine):
    asked = [request(MOVE, seed) for seed in range(5)]
    first = await engine.generate_together(asked)
    again = await engine.generate_together(asked)
    assert first == again
    assert all(text_of(result).lstrip().startswith("{") for result in first)


async def test_the_most_likely_token_is_taken_of_those_that_fit(engine):
    greedy = [await engine.generate(request(MOVE, seed, temperature=0.0)) for seed in (1, 2)]
    assert greedy[0].token_ids == greedy[1].token_ids
    cut = await engine.generate(request(MOVE, 1, top_k=1))
    assert cut.token_ids == greedy[0].token_ids


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        (StructuredOutput("json", '{"type": 5}'), "type must be a string"),
        (StructuredOutput("json", '{"if": {}}'), "Unimplemented keys"),
        (StructuredOutput("json", "false"), "Unsatisfiable"),
        (StructuredOutput("json", '{"$ref": "#"}'), "NoExtension"),
        (StructuredOutput("json", '{"$ref": "http://127.0.0.1/x.json"}'), "not present in a registry"),
        (StructuredOutput("regex", "("), "unclosed group"),
        (StructuredOutput("regex", "(" * 10_000 + ")" * 10_000), "nest"),
        (StructuredOutput("grammar", "start: nobody"), "unknown name"),
        (StructuredOutput("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000), "too deeply nested"),
    ],
)
async def test_what_cannot_be_had_is_refused_and_the_engine_goes_on(engine, structured, why):
    for _ in range(2):  # the second one from memory
        with pytest.raises(StructuredOutputError, match=why):
            await engine.generate(request(structured, 1))
    with pytest.raises(StructuredOutputError, match=why):
        await engine.generate_together([request(None, 1), request(structured, 2)])
    assert len((await engine.generate(request(None, 1, longest=3))).token_ids) <= 3


async def test_one_who_leaves_while_it_is_compiled_costs_nobody_anything(engine):
    leaving = asyncio.ensure_future(engine.generate(request(StructuredOutput("regex", "a{3}b"), 1)))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    result = await engine.generate(request(StructuredOutput("regex", "a{3}b"), 2))
    assert text_of(result) == "aaab"


async def test_new_weights_change_nothing_of_what_fits(engine):
    structured = StructuredOutput("regex", "(Left|Right){40}")
    drawn = asyncio.Event()
    asked = request(structured, 1, longest=400 - 8)
    asked = GenerationRequest(
        asked.request_id, asked.prompt_ids, asked.sampling, 1, on_tokens=lambda ids: drawn.set()
    )
    reply = asyncio.ensure_future(engine.generate(asked))
    await drawn.wait()
    await engine.sync(WeightsOf(engine.model), 1)
    result = await reply
    said = text_of(result)
    assert said.replace("Left", "").replace("Right", "") == ""
    assert set(result.policy_versions) <= {0, 1}


async def test_an_engine_without_the_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = tiny(64)
    async with TorchEngine(model, max_rows=1, max_length=32, tokenizer=TOKENIZER) as running:
        with pytest.raises(StructuredOutputError, match=r"pip install .*\[structured\]"):
            await running.generate(request(MOVE, longest=8))
        assert len((await running.generate(request(None, longest=2))).token_ids) <= 2


async def test_an_engine_without_a_tokenizer_says_so():
    model = tiny(64)
    async with TorchEngine(model, max_rows=1, max_length=32) as running:
        with pytest.raises(StructuredOutputError, match="no tokenizer"):
            await running.generate(request(MOVE, longest=8))
