"""Tiny models of each family, replies of theirs, and runs of a few steps with them."""

import asyncio

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.weights import without_chance

VOCABULARY = 50
STEPS = 3
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The window is shorter than the rows below: what lies outside it must be hidden in decoding, too.
FAMILIES = {
    "qwen2.5": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "llama-3": LlamaConfig(**SHAPE),
    "gemma-2": Gemma2Config(**SHAPE, sliding_window=6, final_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gemma-3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=None,
    ),
    "gemma-3-capped": Gemma3TextConfig(**SHAPE, sliding_window=6, final_logit_softcapping=3.0),
    "mistral": MistralConfig(**SHAPE, sliding_window=6),
    "granite": GraniteConfig(**SHAPE, logits_scaling=8.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.0625),
}


def model_of(family: str, config=None):
    """A model of a family, with weights large enough that caps and scales are felt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = without_chance(
            AutoModelForCausalLM.from_config(config or FAMILIES[family], dtype=torch.float32)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


async def replies_of(model, prompts, *, temperature=1.0, tokens=9):
    async with TorchEngine(model, max_rows=8, max_length=64) as engine:
        return await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(str(number), prompt, SamplingParams(tokens, temperature), number)
                )
                for number, prompt in enumerate(prompts)
            )
        )


PROMPTS = [[5, 9, 11], list(range(3, 20)), [7, 7, 30, 41, 2, 8, 9, 14]]


def words_of(tmp_path, url, *more):
    """Settings of a run of a few steps, of a model that lies in a folder."""
    return [
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 3, format_penalty: -0.1}}]",
        f"env_url={url}",
        f"model.path={tmp_path}/model",
        "model.max_length=512",
        f"output_dir={tmp_path}/run",
        f"steps={STEPS}",
        "rollout={groups_per_step: 2, group_size: 2, max_turns: 3, max_new_tokens: 5}",
        "algorithm={preset: ppo}",
        "evaluation.every=0",
        "checkpoint.every=0",
        "tracking={tensorboard: false, console: false}",
        *more,
    ]
