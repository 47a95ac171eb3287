"""The tiny policy: a few hundred thousand parameters of a standard architecture, made here, nothing downloaded.

Its tokenizer is built here as well, from a list of words, byte for byte reversible. Board symbols, digits and line ends
are one token each, so that a cell of a drawn board is always the same distance in tokens from its neighbour; the words
that our environments and replies use are one token each; everything else falls back to bytes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
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

from rollgym.extras import import_extra
from rollgym.trainer.config.model import VisionSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.picture_processor import PictureProcessor

PAD, END = "<|pad|>", "<|end|>"
IMAGE = "<|image|>"
ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))

_WORDS = """
Left Right Up Down left right up down answer think state board Invalid invalid action actions valid reply the
The a an of to and or is are you You your on in at it move moves moved player box boxes target targets wall
walls floor hole holes goal frozen ice lake push pushes grid cell cells row rows column columns turn turns step
steps one two three reach avoid Solve solve What what equals equal plus minus times number numbers sum Answer
with only Reply each draw drawn symbol symbols means mean left. right. not into off if If from by for as this
that can cannot must do does game play reward rewards end ends ended no No yes Yes true false True False None
Reward
"""

# Each of these characters stands alone; letters form words, a leading space belongs to its word, the rest are runs.
_PIECES = r"[\n]|[0-9]|[_#@$*.+√XOPSGFHWBCA](?![a-z])| ?[A-Za-z]+|[^\sA-Za-z0-9]|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
_WITH_PICTURES = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    f"{{%- if part.type == 'image' -%}}{IMAGE}{{%- else -%}}{{{{ part.text }}}}{{%- endif -%}}"
    "{%- endfor -%}{%- endif -%}",
)


def build_tiny_tokenizer(*, sees: bool = False) -> PreTrainedTokenizerFast:
    """Return the tiny policy's tokenizer; it is the same wherever and whenever it is built.

    Args:
        sees: Whether it has a token for pictures, behind all others, and its chat template writes it.
    """
    vocabulary: dict[str, int] = {}
    for token in (*_SPECIAL, *sorted(ByteLevel.alphabet())):
        vocabulary[token] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    known: set[tuple[str, str]] = set()
    for word in _WORDS.split():
        for form in (word, f" {word}"):
            _add_merges(form, vocabulary, merges, known)
    core = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [Split(Regex(_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    if sees:
        core.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=_WITH_PICTURES if sees else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _add_merges(
    word: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], known: set[tuple[str, str]]
) -> None:
    """Add the merges that build `word` from its first character on, one character at a time."""
    # The byte-level alphabet writes a space as this letter; all our words are ASCII otherwise.
    symbols = word.replace(" ", "Ġ")
    built = symbols[0]
    for symbol in symbols[1:]:
        pair = (built, symbol)
        built += symbol
        if pair not in known:
            known.add(pair)
            merges.append(pair)
        if built not in vocabulary:
            vocabulary[built] = len(vocabulary)


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
    import_extra("PIL", "train")
    # Imported late: policies that read text need no Pillow, and without it this fails with another package's words.
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

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
