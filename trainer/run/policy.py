"""A run's policy: its model, its tokenizer, and how conversations are rendered for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollgym.trainer.config.checks import why_blind
from rollgym.trainer.config.model import gguf_file
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import DTYPES, torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.numbers import MOST_IDS
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.models.device import use_liger
from rollgym.trainer.models.language_head import check_positions
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder, stop_ids, vocabulary_of
from rollgym.trainer.models.lora import ADAPTER_CONFIG, add_lora, load_adapter
from rollgym.trainer.models.picture_processor import BLIND, PictureProcessor
from rollgym.trainer.models.pictures import load_pictures, sees
from rollgym.trainer.models.tiny import (
    IMAGE,
    TinyPolicySettings,
    build_tiny_model,
    build_tiny_tokenizer,
    tiny_pictures,
)
from rollgym.trainer.models.weights import place
from rollgym.trainer.rollout.context import example_messages
from rollgym.trainer.rollout.prompts import ChatRenderer


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, its tokenizer and how conversations are rendered for it."""

    model: PreTrainedModel
    tokenizer: Any
    renderer: ChatRenderer

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows: some of them may stand for no token."""
        return vocabulary_of(self.model)

    @property
    def processor(self) -> Any:
        """Return what is saved beside the model: its tokenizer, or the processor of a model that sees."""
        pictures = self.renderer.pictures
        return pictures.processor if isinstance(pictures, PictureProcessor) else self.tokenizer


def build_policy(
    settings: RunSettings, directory: Path | None = None, *, trained: bool = False, computes: bool = True
) -> Policy:
    """Load the policy from `directory` (or the path in the settings), or build the tiny one, and add its adapters.

    Args:
        settings: The run.
        directory: A model's folder, or one with adapters only.
        trained: Whether all its weights will be trained. Then they are kept in float32 until a backend has them.
        computes: Whether this process computes with it. If not, it stays in the host's memory.

    Raises:
        ConfigError: If the model, device or attention is unknown, or the longest row exceeds the model's positions.
    """
    device = torch_device(settings.model.device)
    if not computes:
        device = torch.device("cpu")
    dtype = torch.float32 if trained and settings.model.lora is None else DTYPES[settings.model.dtype]
    adapter = directory if directory is not None and (directory / ADAPTER_CONFIG).exists() else None
    path = directory if adapter is None else None
    if path is None and settings.model.path:
        path = model_folder(settings.model.path)
    if path is not None:
        model = load_model(path, dtype, settings.model.attention)
        check_positions(model, settings.model.max_length)
        named = settings.model.path
        # Adapters name what they belong to, and other tools know neither our names of packages nor GGUF files.
        model.name_or_path = str(path) if named is None or gguf_file(named) is not None else named
        tokenizer = load_tokenizer(path)
        pictures = (why_blind(settings) or load_pictures(path, tokenizer)) if sees(model) else BLIND
    else:
        vision = settings.model.vision
        tokenizer = build_tiny_tokenizer(sees=vision is not None)
        model = _tiny_model(settings, tokenizer)
        pictures = BLIND if vision is None else tiny_pictures(vision, tokenizer)
    place(model, dtype, device)
    model.config.dtype = DTYPES[settings.model.dtype]
    if settings.model.kernels == "liger" and computes:
        use_liger(model)
    if settings.model.lora is not None and (directory is None or adapter is not None):
        add_lora(model, settings.model.lora, derive_seed(settings.seed, "adapters"))
    if adapter is not None:
        load_adapter(model, adapter)
    renderer = chat_renderer(settings, tokenizer, stop_ids(model), pictures, vocabulary_of(model))
    return Policy(model, tokenizer, renderer)


def _tiny_model(settings: RunSettings, tokenizer: Any) -> PreTrainedModel:
    vision = settings.model.vision
    shape = TinyPolicySettings(
        vocabulary=len(tokenizer),
        hidden_size=settings.model.hidden_size,
        layers=settings.model.layers,
        heads=settings.model.heads,
        max_length=settings.model.max_length,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        vision=None if vision is None else (vision, tokenizer.convert_tokens_to_ids(IMAGE)),
    )
    return build_tiny_model(shape, derive_seed(settings.seed, "model"), settings.model.attention)


def chat_renderer(
    settings: RunSettings,
    tokenizer: Any,
    stops: Iterable[int] = (),
    pictures: PictureProcessor | str = BLIND,
    vocabulary: int = MOST_IDS,
) -> ChatRenderer:
    """Return the renderer of a run's conversations; the tokenizer adopts the run's chat template.

    Args:
        settings: The run.
        tokenizer: The model's.
        stops: Ids that end a reply, beside those that tokenizer and template name.
        pictures: The model's image processor, or the reason why it has none.
        vocabulary: Number of token ids that the model knows.

    Raises:
        ConfigError: If the template cannot be read or used, or the worked turns leave no room for an episode.
    """
    if settings.prompt.chat_template is not None:
        try:
            tokenizer.chat_template = Path(settings.prompt.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompt.chat_template: {error}") from error
    renderer = ChatRenderer(tokenizer, settings.prompt.template_kwargs, stops, pictures, vocabulary)
    _check_room(settings, renderer)
    return renderer


def _check_room(settings: RunSettings, renderer: ChatRenderer) -> None:
    """Refuse worked turns that leave no room for an episode after them.

    Raises:
        ConfigError: If they do not.
    """
    examples = example_messages(settings.prompt)
    if not examples:
        return
    tokens = len(renderer.prompt([*examples, {"role": "user", "content": ""}]))
    limits = {"model.max_length": settings.model.max_length - settings.rollout.max_new_tokens}
    if settings.prompt.compact_above is not None:
        limits["prompt.compact_above"] = settings.prompt.compact_above
    for key, limit in limits.items():
        if tokens >= limit:
            raise ConfigError(
                f"prompt.examples take {tokens} tokens of every prompt, and {key} leaves no room for an episode behind "
                "them: show fewer, or raise it"
            )
