"""The tiny policy: a few hundred thousand parameters of a standard architecture, made here, nothing downloaded."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rollgym.trainer.config.model import VisionSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.tokenizer import IMAGE

_INITIAL_DEVIATION = 0.08
"""The library's 0.02 suits widths of thousands; with it a narrow model's attention starts flat, and long stays so."""


@dataclass(frozen=True, slots=True)
class TinyPolicySettings:
    """Shape of the tiny policy.

    Attributes:
        vocabulary: Number of tokens.
        hidden_size: Width.
        layers: Depth.
        heads: Attention heads.
        max_length: Longest row in tokens.
        end_id: Token that ends a reply.
        pad_id: Token that fills up batches.
        vision: The vision tower's settings, and the token that stands for a patch; None for text only.
    """

    vocabulary: int
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 1024
    end_id: int = 1
    pad_id: int = 0
    vision: tuple[VisionSettings, int] | None = None


def build_tiny_model(
    settings: TinyPolicySettings, seed: int, attention: str | None = None
) -> PreTrainedModel:
    """Return a randomly initialised policy; equal seeds give equal weights.

    Raises:
        ConfigError: If the heads do not divide the width into even parts.
    """
    if settings.hidden_size % (2 * settings.heads):
        raise ConfigError(
            f"model.hidden_size {settings.hidden_size} must be a multiple of twice model.heads {settings.heads}"
        )
    config = Qwen3Config(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden_size,
        intermediate_size=4 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden_size // settings.heads,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_DEVIATION,
        # The slowest rotation turns about once a row: all of them tell neighbouring cells apart.
        rope_parameters={"rope_type": "default", "rope_theta": float(settings.max_length)},
        eos_token_id=settings.end_id,
        pad_token_id=settings.pad_id,
    )
    # The run's other random numbers must not depend on whether a model was built.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model: PreTrainedModel = (
            Qwen3ForCausalLM(config)
            if settings.vision is None
            else LlavaForConditionalGeneration(_seeing(config, *settings.vision))
        )
    if attention is not None:
        model.set_attn_implementation(attention)
    return model.float()


def _seeing(text: Qwen3Config, vision: VisionSettings, image_id: int) -> LlavaConfig:
    """Return the configuration of a policy whose tower is as wide as itself."""
    tower = CLIPVisionConfig(
        hidden_size=text.hidden_size,
        intermediate_size=4 * text.hidden_size,
        num_hidden_layers=vision.layers,
        num_attention_heads=text.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
    )
    options: dict[str, Any] = {
        "image_token_id": image_id,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "pad_token_id": text.pad_token_id,
        "eos_token_id": text.eos_token_id,
    }
    return LlavaConfig(vision_config=tower, text_config=text, **options)


def tiny_pictures(vision: VisionSettings, tokenizer: PreTrainedTokenizerFast) -> PictureProcessor:
    """Return what reads pictures for the tiny policy: one token for each patch."""
    side = vision.image_size
    images = CLIPImageProcessorPil(
        size={"height": side, "width": side}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token=IMAGE,
        num_additional_image_tokens=1,  # the tower's own first one, which "default" leaves out
    )
    return PictureProcessor(processor)
