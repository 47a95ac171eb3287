"""What a model reads of pictures: its processor's tensors, and their features in the places of their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin

from trainer.core.errors import ConfigError
from trainer.records.images import Picture, PlacedImage

BLIND = "the model reads text only"
"""Why a policy sees no pictures, where nothing else is said."""

_CACHE_SIZE = 512
_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class PictureProcessor:
    """Makes of a picture the placeholder tokens that stand for it, and what the model reads in their place.

    Args:
        processor: The model's processor.

    Attributes:
        token: The placeholder as text: what a chat template writes once for each picture.
        token_id: The placeholder's id.
        processor: The processor itself.

    Raises:
        ConfigError: If it has no placeholder for pictures.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
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


def sees(model: PreTrainedModel) -> bool:
    """Whether a model has something to see pictures with."""
    return getattr(model.config, "vision_config", None) is not None


def load_pictures(directory: Path, tokenizer: Any) -> PictureProcessor | str:
    """Load the processor that lies beside a model that sees; or say why it cannot be had.

    Args:
        directory: Where it lies.
        tokenizer: The model's, which takes up the processor's chat template if it has none.
    """
    try:
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processor.chat_template
        return PictureProcessor(processor)
    except (ConfigError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        return f"the processor in {directory} cannot be loaded: {error}"


@dataclass(frozen=True, slots=True)
class ImageTensors:
    """The pictures of a few rows, equal ones once.

    Attributes:
        inputs: What the model reads of them, all together.
        row: Row of each placeholder token, int64 `[n]`.
        column: Its column, int64 `[n]`.
        which: Feature that stands in its place, among those of all pictures in order, int64 `[n]`.
    """

    inputs: Mapping[str, Tensor]
    row: Tensor
    column: Tensor
    which: Tensor


def image_tensors(
    model: PreTrainedModel,
    ids: Tensor,
    images: Sequence[Sequence[PlacedImage]],
    offsets: Sequence[int] | None = None,
) -> ImageTensors | None:
    """Return the pictures of rows as tensors; None where there are none.

    Args:
        model: A model that sees, or the body of one.
        ids: The rows' padded ids, `[rows, tokens]`.
        images: The pictures of each row.
        offsets: Columns before each row's first token; none where absent.

    Raises:
        ValueError: If no processor has read a picture.
    """
    if not any(images):
        return None
    token = model.config.image_token_id
    host = ids.cpu()
    first: dict[Picture, int] = {}
    pictures: list[Picture] = []
    rows, columns, which = [], [], []
    features = 0
    for row, placed in enumerate(images):
        offset = 0 if offsets is None else offsets[row]
        for image in placed:
            span = host[row, offset + image.start : offset + image.end]
            found = (span == token).nonzero()[:, 0]
            if image.picture not in first:
                first[image.picture] = features
                pictures.append(image.picture)
                features += len(found)
            rows.append(torch.full_like(found, row))
            columns.append(found + offset + image.start)
            which.append(torch.arange(len(found)) + first[image.picture])
    return ImageTensors(
        _together(pictures, model), *(torch.cat(each).to(model.device) for each in (rows, columns, which))
    )


def _together(pictures: Sequence[Picture], model: PreTrainedModel) -> dict[str, Tensor]:
    if any(picture.inputs is None for picture in pictures):
        raise ValueError("a picture was not read by the model's processor before it is computed with")
    inputs = [picture.inputs for picture in pictures if picture.inputs is not None]
    together = {name: torch.cat([each[name] for each in inputs]).to(model.device) for name in inputs[0]}
    return {
        name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in together.items()
    }


def tokens_or_embeddings(
    model: PreTrainedModel, ids: Tensor, images: ImageTensors | None
) -> dict[str, Tensor]:
    """Return what a model's forward is given of rows: their ids, or embeddings where they hold pictures."""
    return {"input_ids": ids} if images is None else {"inputs_embeds": embeddings(model, ids, images)}


def embeddings(body: PreTrainedModel, ids: Tensor, images: ImageTensors) -> Tensor:
    """Return the embeddings of rows, `[rows, tokens, width]`, with pictures' features in their tokens' places.

    Only there: a placeholder that the policy drew itself is a token like any other.

    Args:
        body: A model that sees.
        ids: The rows' padded ids.
        images: Their pictures.

    Raises:
        ConfigError: If the model makes another number of features than there are tokens.
    """
    words: Tensor = body.get_input_embeddings()(ids)
    made: Any = body.get_image_features(**images.inputs)
    features = getattr(made, "pooler_output", made)
    if not isinstance(features, Tensor):
        features = torch.cat([each.flatten(0, -2) for each in features])
    features = features.flatten(0, -2)
    if len(features) != int(images.which.max()) + 1:
        raise ConfigError(
            f"{type(body).__name__} makes {len(features)} features of pictures for {int(images.which.max()) + 1} "
            "placeholder tokens: its processor is of another model"
        )
    return words.index_put((images.row, images.column), features[images.which].to(words.dtype))
