"""A policy that sees pictures, small enough for tests, with weights large enough that every pixel is felt."""

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.config.model import VisionSettings
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import own_inputs
from rollgym.trainer.models.tiny import (
    IMAGE,
    TinyPolicySettings,
    build_tiny_model,
    build_tiny_tokenizer,
    tiny_pictures,
)
from rollgym.trainer.models.weights import without_chance
from rollgym.trainer.records.images import Picture, PlacedImage

VISION = VisionSettings(image_size=16, patch_size=8, layers=1)
TOKENIZER = build_tiny_tokenizer(sees=True)
PICTURES = tiny_pictures(VISION, TOKENIZER)


def seeing_model(seed: int = 0):
    """A policy of LLaVA's make whose tower sees pictures of 16 pixels as four tokens."""
    image_id = TOKENIZER.convert_tokens_to_ids(IMAGE)
    shape = TinyPolicySettings(
        len(TOKENIZER), hidden_size=16, layers=2, heads=2, max_length=128, vision=(VISION, image_id)
    )
    model = build_tiny_model(shape, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0 if "language_model" in name else 4.0)
    return model.eval()


def picture(number: int, side: int = 16) -> Picture:
    """A picture of noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Picture(pixels)


def shown(parts: list, pictures: PictureProcessor = PICTURES) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Ids and pictures of a sequence of ids and pictures."""
    ids: list[int] = []
    placed: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        tokens, read = pictures.read(part)
        placed.append(PlacedImage(len(ids), len(ids) + len(tokens), read))
        ids += tokens
    return ids, tuple(placed)


def own_logprobs(model, ids: list[int], images, temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, by the library's forward of ids and pixels."""
    given = own_inputs(model, torch.tensor(ids), images)
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class PatchesProcessor:
    """A processor of Qwen's make without videos, which would need torchvision."""

    image_token = IMAGE
    image_token_id = TOKENIZER.convert_tokens_to_ids(IMAGE)

    def __init__(self) -> None:
        self._images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096
        )

    def __call__(self, text, images, **_):
        made = self._images(images, return_tensors="pt")
        tokens = int(made["image_grid_thw"].prod()) // 4
        assert text == [IMAGE]
        return {"input_ids": torch.full((1, tokens), self.image_token_id), **made}


PATCHES = PictureProcessor(PatchesProcessor())


def patched_model():
    """A policy of Qwen2.5-VL's make: pictures of any size, and positions in height and width."""
    text = {
        "vocab_size": len(TOKENIZER),
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 16,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=PATCHES.token_id,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = without_chance(Qwen2_5_VLForConditionalGeneration(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def row_of(
    parts: list, reply: list[int], weight: float = 1.0, pictures: PictureProcessor = PICTURES
) -> TrainRow:
    """A row that trains on a reply behind ids and pictures."""
    ids, images = shown(parts, pictures)
    mask = torch.tensor([False] * len(ids) + [True] * len(reply))
    return TrainRow(torch.tensor(ids + reply), mask, {"weight": mask * weight}, images=images)
