"""Checks, before decoding in slots, whether a model computes the same in slots as with whole rows."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.inference.slot_model import SlotModel
from rollgym.trainer.models.language_head import LanguageHead
from rollgym.trainer.models.trials import UNLIKE, why_no_cache_of_its_own

_TOKENS = 40
"""Of the longest row that is tried."""


@torch.inference_mode()
def why_no_slots(model: PreTrainedModel, max_length: int) -> str | None:
    """Return why rows of a model cannot be decoded in slots, or None if they can.

    What its settings do not rule out is tried on rows of unequal lengths, two of which share their beginning.

    Args:
        model: The policy.
        max_length: Longest row in tokens.
    """
    config = model.config.get_text_config()
    if (attention := str(config._attn_implementation)) not in ("sdpa", "eager"):
        return f"its attention ({attention}) takes no mask of ours"
    if (odd := why_no_cache_of_its_own(config)) is not None:
        return odd
    if not LanguageHead(model).is_whole():
        return "its logits are made by its whole forward, and not of its last hidden states alone"
    try:
        return (
            None
            if _is_exact(model, max_length)
            else "what it computes there is not what it computes of whole rows"
        )
    except torch.OutOfMemoryError:
        raise
    except UNLIKE as error:
        return f"it cannot compute them ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _is_exact(model: PreTrainedModel, max_length: int) -> bool:
    """Whether logits of prompts, behind a shared beginning and of a decoding step are the model's own."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    # What lies outside a window that rows can pass must be hidden.
    longest = window + 8 if isinstance(window, int) and window < max_length else _TOKENS
    length = max(min(longest, max_length - 2), 6)
    ids = (torch.arange(length + 1) * 7 + 3) % text.vocab_size
    shared = length - 3
    rows = [ids, torch.cat([ids[:shared], (ids[:4] + 1) % text.vocab_size]), ids[:3]]
    before, whole = [_own(model, row[:-1]) for row in rows], [_own(model, row) for row in rows]
    expected = [torch.cat([before[0], before[2]]), before[1], torch.cat(whole)]
    return all(
        _is_alike(*each) for each in zip(_in_slots(model, rows, shared, max_length), expected, strict=True)
    )


def _is_alike(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # In bf16 a router that breaks a tie the other way changes a whole row.
    return bool(error.median() < 5e-2 if found.dtype == torch.bfloat16 else error.max() < 1e-4)


def _own(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None].to(model.device), use_cache=False).logits[:, -1]


def _in_slots(model: PreTrainedModel, rows: list[Tensor], shared: int, max_length: int) -> list[Tensor]:
    """Return logits of three rows but for their last tokens, the first and the third together, and then of all."""
    slots = SlotModel(model, max_length)
    length = len(rows[0])
    slots.resize(3, length + 8)  # more than the longest row has
    ids, columns = torch.zeros(2, length - 1, dtype=torch.long), torch.full((2, length - 1), length + 8)
    for number, row in enumerate((rows[0], rows[2])):
        ids[number, : len(row) - 1] = row[:-1]
        columns[number, : len(row) - 1] = torch.arange(len(row) - 1)
    found = [slots.read(ids, columns, [0, 2], [length - 2, len(rows[2]) - 2], 0)]
    if not slots.cache.written:
        raise RuntimeError("the model passed over the cache that it was given")
    slots.cache.copy([0], [1], shared)
    last = len(rows[1]) - 1
    found.append(
        slots.read(
            rows[1][None, shared:last], torch.arange(shared, last)[None], [1], [last - shared - 1], last
        )
    )
    where = torch.tensor([len(row) - 1 for row in rows])
    tokens = torch.stack([torch.stack([row[-1] for row in rows]), where, where])
    found.append(slots.step(tokens.to(model.device), length + 8))
    return found
