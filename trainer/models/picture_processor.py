"""The processor of a model that sees: what stands for a picture among tokens."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.records.images import Picture, PlacedImage

BLIND = "the model reads text only"
"""The default reason why a policy sees no pictures."""

_CACHE_SIZE = 512
_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class PictureProcessor:
    """Makes of a picture the placeholder tokens that stand for it, and what the model reads in their place.

    Args:
        processor: The model's processor, as transformers has it.

    Attributes:
        token: The placeholder as text: what a chat template writes once for each picture.
        token_id: The placeholder's id.
        processor: The processor itself.

    Raises:
        ConfigError: If it has no placeholder for pictures.
    """

    def __init__(self, processor: Any) -> None:
        token_id = getattr(processor, "image_token_id", None)
        if token_id is None or not isinstance(getattr(processor, "image_token", None), str):
            raise ConfigError(
                f"{type(processor).__name__} has no placeholder for pictures, and the policy is to see some: take a "
                "model of another family (docs/models.md)"
            )
        self.token: str = processor.image_token
        self.token_id = int(token_id)
        self.processor = processor
        self._read = lru_cache(maxsize=_CACHE_SIZE)(self._read_anew)

    def read(self, picture: Picture) -> tuple[list[int], Picture]:
        """Return the ids that stand for a picture, and the picture with what the model reads of it."""
        return self._read(picture)

    def filled(self, images: Sequence[PlacedImage]) -> list[PlacedImage]:
        """Return pictures of a record with what the model reads of them."""
        return [PlacedImage(each.start, each.end, self.read(each.picture)[1]) for each in images]

    def _read_anew(self, picture: Picture) -> tuple[list[int], Picture]:
        made: Any = self.processor(
            text=[self.token], images=[picture.pixels], add_special_tokens=False, return_tensors="pt"
        )
        ids: list[int] = made["input_ids"][0].tolist()
        inputs = {name: tensor for name, tensor in made.items() if name not in _OF_TOKENS}
        return ids, Picture(picture.pixels, inputs)
