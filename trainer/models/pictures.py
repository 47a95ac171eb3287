"""A model's inputs for pictures: its processor's tensors, and their features in the places of their tokens."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.records.images import Picture, PlacedImage


def sees(model: PreTrainedModel) -> bool:
    """Whether a model has something to see pictures with."""
    return getattr(model.config, "vision_config", None) is not None


def load_pictures(directory: Path, tokenizer: Any) -> PictureProcessor | str:
    """Load the image processor of a model that sees; or say why it is not available.

    Args:
        directory: The model's folder.
        tokenizer: The model's, which adopts the processor's chat template if it has none.
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
        inputs: The model's inputs for all pictures together.
        row: Row of each placeholder token, int64 `[n]`.
        column: Its column, int64 `[n]`.
        which: Feature that stands in its place, among those of all pictures in order, int64 `[n]`.
        positions: Positions of all tokens in time, height and width, int64 `[3, rows, tokens]`, for models whose
            pictures have such; None for others.
        shifts: Offset between each row's next position and its number of tokens; 0 without positions.
    """

    inputs: Mapping[str, Tensor]
    row: Tensor
    column: Tensor
    which: Tensor
    positions: Tensor | None
    shifts: list[int]


def image_tensors(
    model: PreTrainedModel,
    ids: Tensor,
    images: Sequence[Sequence[PlacedImage]],
    offsets: Sequence[int] | None = None,
) -> ImageTensors | None:
    """Return the pictures of rows as tensors; None if there are none.

    Args:
        model: A model that sees, or the body of one.
        ids: The rows' padded ids, `[rows, tokens]`.
        images: The pictures of each row.
        offsets: Columns before each row's first token; zero if absent.

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
    positions, shifts = _positions(model, host, images, [0] * len(host) if offsets is None else offsets)
    return ImageTensors(
        _together(pictures, model),
        torch.cat(rows).to(model.device),
        torch.cat(columns).to(model.device),
        torch.cat(which).to(model.device),
        positions,
        shifts,
    )


def _positions(
    model: PreTrainedModel, ids: Tensor, images: Sequence[Sequence[PlacedImage]], offsets: Sequence[int]
) -> tuple[Tensor | None, list[int]]:
    """Return positions of tokens in three dimensions by the model's own code, and what they add behind each row."""
    find = getattr(model.base_model, "get_rope_index", None)
    if find is None:
        return None, [0] * len(ids)
    # Those of text alone count tokens.
    positions = (
        (torch.arange(ids.shape[1]) - torch.tensor(offsets)[:, None]).clamp(min=0).expand(3, -1, -1).clone()
    )
    shifts = [0] * len(ids)
    for row, placed in enumerate(images):
        if placed:
            own = ids[row, offsets[row] :]
            grids = {
                name: torch.cat([_read(each.picture)[name] for each in placed])
                for name in _read(placed[0].picture)
                if name.endswith("grid_thw")
            }
            found, shift = find(own[None], mm_token_type_ids=kinds_of(model, own, placed)[None], **grids)
            positions[:, row, offsets[row] :] = found[:, 0]
            shifts[row] = int(shift.flatten()[0])
    return positions.to(model.device), shifts


def kinds_of(model: PreTrainedModel, ids: Tensor, images: Sequence[PlacedImage]) -> Tensor:
    """Return 1 for the tokens of a row that stand for pictures, and 0 for all others, `[tokens]`."""
    kinds = torch.zeros_like(ids)
    for image in images:
        span = slice(image.start, image.end)
        kinds[span] = (ids[span] == model.config.image_token_id).long()
    return kinds


def _read(picture: Picture) -> Mapping[str, Any]:
    if picture.inputs is None:
        raise ValueError("a picture was not read by the model's processor before it is computed with")
    return picture.inputs


def _together(pictures: Sequence[Picture], model: PreTrainedModel) -> dict[str, Tensor]:
    inputs = [_read(picture) for picture in pictures]
    return {name: _brought(torch.cat([each[name] for each in inputs]), model) for name in inputs[0]}


def tokens_or_embeddings(
    model: PreTrainedModel, ids: Tensor, images: ImageTensors | None
) -> dict[str, Tensor]:
    """Return the inputs of a model's forward for rows: their ids, or embeddings if they contain pictures."""
    if images is None:
        return {"input_ids": ids}
    given = {"inputs_embeds": embeddings(model, ids, images)}
    return given if images.positions is None else given | {"position_ids": images.positions}


def own_inputs(model: PreTrainedModel, ids: Tensor, images: Sequence[PlacedImage]) -> dict[str, Tensor]:
    """Return what the library's own forward is given of a row `[tokens]`, as its processor and `generate` give it."""
    tensors = [_read(image.picture) for image in images]
    given = {name: torch.cat([each[name] for each in tensors]) for name in (tensors[0] if tensors else ())}
    kinds = kinds_of(model, ids.cpu(), images)[None]
    wanted = inspect.signature(model.forward).parameters
    given |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in wanted and tensors}
    return {"input_ids": ids[None]} | {name: _brought(each, model) for name, each in given.items()}


def _brought(tensor: Tensor, model: PreTrainedModel) -> Tensor:
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)


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
    seeing: Any = body  # the library's types know no model that sees
    words: Tensor = seeing.get_input_embeddings()(ids)
    made = seeing.get_image_features(**images.inputs)
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
