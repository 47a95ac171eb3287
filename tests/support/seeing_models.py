"""A policy that sees pictures, small enough for tests, with weights large enough that every pixel is felt."""

import numpy as np
import torch

from trainer.backends.base import TrainRow
from trainer.config.model import VisionSettings
from trainer.models.pictures import PictureProcessor
from trainer.models.tiny import TinyPolicySettings, build_tiny_model, tiny_pictures
from trainer.models.tokenizer import IMAGE, build_tiny_tokenizer
from trainer.records.images import Picture, PlacedImage

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
    inputs = {}
    if images:
        names = images[0].picture.inputs
        inputs = {name: torch.cat([each.picture.inputs[name] for each in images]) for name in names}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def row_of(parts: list, reply: list[int], weight: float = 1.0) -> TrainRow:
    """A row that trains on a reply behind ids and pictures."""
    ids, images = shown(parts)
    mask = torch.tensor([False] * len(ids) + [True] * len(reply))
    return TrainRow(torch.tensor(ids + reply), mask, {"weight": mask * weight}, images=images)
