"""Whole runs of tiny models of each family: three steps, with tokenizers trained here and templates of their shapes."""

import asyncio
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollgym.trainer.config.load import load_settings
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.run.learning import learn
from tests.support.chat_templates import trained_tokenizer
from tests.support.current_families import FAMILIES, STEPS, model_of, words_of
from tests.support.processes import env_server
from tests.support.tiny_models import reference_logprobs

# Which template a family's instruct models have; Cohere's is not among those that are wanted.
TEMPLATES = {
    "qwen2.5": "qwen2.5",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3",
    "llama-3": "llama-3",
    "gemma-2": "gemma",
    "gemma-3": "gemma",
    "mistral": "mistral",
    "granite": "granite",
}


@pytest.fixture(scope="module")
def url():
    with env_server() as address:
        yield address


@pytest.fixture
def drawn(monkeypatch):
    """All replies that engines give, in the order of their requests' ends: prompt ids and sampled ids."""
    seen = []
    generate = TorchEngine.generate

    async def listening(engine, request):
        result = await generate(engine, request)
        seen.append((tuple(request.prompt_ids), tuple(result.token_ids), tuple(result.logprobs)))
        return result

    monkeypatch.setattr(TorchEngine, "generate", listening)
    return seen


def folder_of(family, directory):
    """A model of a family on disk, with its tokenizer beside it."""
    tokenizer = trained_tokenizer(TEMPLATES[family])
    config = FAMILIES[family]
    shape = {
        "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    model = model_of(family, type(config)(**{**config.to_dict(), **shape}))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def segments_of(tmp_path):
    for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines():
        yield json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("family", TEMPLATES)
def test_three_steps_of_training(family, tmp_path, url, drawn, capsys):
    model, tokenizer = folder_of(family, tmp_path / "model")
    asyncio.run(learn(load_settings(None, words_of(tmp_path, url)), "train"))
    episodes = list(segments_of(tmp_path))
    assert len(episodes) == STEPS * 4

    # What is trained on is what the engine drew, id by id, and never text that was encoded once more.
    replies = {(prompt, ids): logprobs for prompt, ids, logprobs in drawn}
    retokenised_differently = 0
    for episode in episodes:
        for turn in episode["turns"]:
            segment, start, end = turn["tokens"]
            ids = episode["segments"][segment]["ids"]
            reply = tuple(ids[start:end])
            assert (tuple(ids[:start]), reply) in replies
            text = tokenizer.decode(list(reply), skip_special_tokens=False)
            retokenised_differently += tokenizer.encode(text, add_special_tokens=False) != list(reply)
    assert retokenised_differently > len(episodes) / 2, "encoding replies again would have shown"

    # Templates that rewrite the past cost segments, and the run says so.
    rewrites = TEMPLATES[family] == "qwen3"
    several = [episode for episode in episodes if len(episode["turns"]) > 1]
    assert several
    assert any(episode["forks"] > 0 for episode in several) is rewrites
    assert ("chat template: it rewrites earlier turns" in capsys.readouterr().out) is rewrites

    # The log-probabilities of the first step's episodes are those of the model's own forward.
    for episode in episodes[:4]:
        for segment in episode["segments"]:
            expected = [0.0, *reference_logprobs(model, segment["ids"])]
            own = [value for value, used in zip(expected, segment["action_mask"], strict=True) if used]
            assert segment["logprobs"] == pytest.approx(own, abs=1e-5)

    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        assert line.get("mismatch/k3", 0.0) == pytest.approx(0.0, abs=1e-8)
    assert sum(line.get("policy/optimizer_steps", 0.0) for line in metrics) >= STEPS

    # What was learnt is written under the names of the hub, and any tool loads it.
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == tokenizer.chat_template
    names = []
    for folder in (tmp_path / "run" / "model", tmp_path / "model"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]
    changed = [
        name
        for (name, one), two in zip(model.named_parameters(), trained.parameters(), strict=True)
        if not torch.equal(one, two)
    ]
    assert len(changed) > 0.8 * len(list(model.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["model.dtype=bf16"], ["rollout.max_staleness=1"], ["model.lora={rank: 4}"]]
)
def test_three_steps_in_other_ways(tmp_path, url, more):
    """A mixture of experts, whose weights lie otherwise in the library than on disk: rounded, copied, with adapters."""
    folder_of("qwen3-moe", tmp_path / "model")
    words = words_of(tmp_path, url, *more, "algorithm={preset: ppo, kl: {coefficient: 0.1, placement: loss}}")
    asyncio.run(learn(load_settings(None, words), "train"))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("policy/optimizer_steps", 0.0) for line in metrics) >= STEPS
    # At the first update nothing is stale: what was drawn and what is trained differ by rounding alone.
    first = next(line["mismatch/k3"] for line in metrics if "mismatch/k3" in line)
    assert first < (1e-2 if "bf16" in more[0] else 1e-8)
    produced = tmp_path / "run" / ("adapter" if "lora" in more[0] else "model")
    assert list(produced.glob("*.safetensors"))
