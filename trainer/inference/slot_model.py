"""A model that reads and writes slots of keys and values: prompts of any number, and decoding steps of one shape.

A decoding step is a function of a few small tensors on the device. Nothing in it waits for the host, and its shapes are
its number of rows and a rounded length, so it can be recorded once and launched as a whole.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rollgym.trainer.inference.captured_steps import CapturedSteps, can_record
from rollgym.trainer.inference.slot_cache import SlotCache, SlotCall
from rollgym.trainer.models.language_head import LanguageHead, cache_argument
from rollgym.trainer.models.pictures import ImageTensors, tokens_or_embeddings

Masks = Tensor | dict[str, Tensor]


class SlotModel:
    """Logits of rows whose keys and values stand in slots.

    Args:
        model: The policy.
        max_length: Longest row in tokens.

    Attributes:
        cache: The slots.
        captures: Whether decoding steps are launched as a whole: their shapes should be few then.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._model = model
        self._body = cast(PreTrainedModel, model.base_model)
        self._head = LanguageHead(model)
        self._cache_argument = cache_argument(self._body)
        self._window, self._all_near = _window(model.config.get_text_config(), max_length)
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self.captures = can_record(model.device)
        self._captured = CapturedSteps(self.step, model.device) if self.captures else None
        self._addresses = self._weights_at()

    def decode(self, tokens: Tensor, width: int) -> Tensor:
        """Return the logits behind one more token of each of the first slots, `[rows, vocabulary]`.

        They are valid until the next call.

        Args:
            tokens: Ids, columns that they are written into and positions, int64 `[3, rows]`, on the host.
            width: Columns that are read.
        """
        if self._captured is not None:
            return self._captured(tokens, width)
        return self.step(tokens.to(self._model.device), width)

    def step(self, tokens: Tensor, width: int) -> Tensor:
        """Compute what `decode` returns of tokens that are on the device."""
        ids, columns, positions = tokens
        rows = len(ids)
        first = torch.arange(rows, device=tokens.device) * (self.cache.columns + 1)
        cache = self.cache.during(SlotCall(first + columns, width, rows))
        mask = self._masks(columns[:, None], width)
        states = self._states(cache, mask, input_ids=ids[:, None], position_ids=positions[:, None])
        return self._head.logits(states[:, -1])

    def read(
        self,
        ids: Tensor,
        columns: Tensor,
        slots: Sequence[int],
        last: Sequence[int],
        width: int,
        images: ImageTensors | None = None,
    ) -> Tensor:
        """Return the logits behind the last of several tokens of rows, `[rows, vocabulary]`.

        Args:
            ids: Token ids, padded on the right, int64 `[rows, new]`.
            columns: Their columns in their slots; for padding, one behind all that are read.
            slots: The rows' slots.
            last: Index of each row's last token.
            width: Columns that are read, or 0 if no row has any before these.
            images: Pictures among the tokens.
        """
        device = self._model.device
        where, columns = torch.tensor(slots, device=device), columns.to(device)
        places = (where[:, None] * (self.cache.columns + 1) + columns).flatten()
        cache = self.cache.during(SlotCall(places, width, len(slots), where))
        # Padding may have no position of its own: tables of positions end.
        given = {"position_ids": columns.where(columns < self.cache.columns, 0)}
        given |= tokens_or_embeddings(self._body, ids.to(device), images)
        states = self._states(cache, self._masks(columns, width) if width else None, **given)
        return self._head.logits(
            states[torch.arange(len(slots), device=device), torch.tensor(last, device=device)]
        )

    def resize(self, slots: int, columns: int) -> None:
        """Have other slots; what was recorded with those before is void."""
        self.cache.resize(slots, columns)
        self._void()

    def release(self) -> None:
        """Give back the memory of all slots, and of what was recorded with them."""
        self.cache.release()
        self._void()

    def take_weights(self) -> None:
        """Continue with new weights: drop the cache, and graphs captured with tensors at other addresses."""
        self.cache.clear()
        if self._addresses != (addresses := self._weights_at()):
            self._addresses = addresses
            self._void()

    def _void(self) -> None:
        if self._captured is not None:
            self._captured.clear()

    def _weights_at(self) -> list[int]:
        return [each.data_ptr() for each in self._model.parameters()] if self.captures else []

    def _states(self, cache: Cache, mask: Masks | None, **given: Tensor) -> Tensor:
        named: dict[str, Any] = {self._cache_argument: cache, "attention_mask": mask, "use_cache": True}
        states: Tensor = self._body(**given, **named).last_hidden_state
        return states

    def _masks(self, columns: Tensor, width: int) -> Masks:
        """Return what is added to attention's scores: of the tokens that stand in columns `[rows, new]`."""
        others = torch.arange(width, device=columns.device)
        seen = others <= columns[..., None]
        if self._window is None:
            return self._added(seen)
        near = self._added(seen & (others > columns[..., None] - self._window))
        return near if self._all_near else {"full_attention": self._added(seen), "sliding_attention": near}

    def _added(self, seen: Tensor) -> Tensor:
        added = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        return added.masked_fill_(~seen, -torch.inf)[:, None]


def _window(config: Any, max_length: int) -> tuple[int | None, bool]:
    """Return how far some layers look back, None if further than any row is long, and whether all layers do."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is None or window >= max_length or "sliding_attention" not in kinds:
        return None, False
    return int(window), kinds == {"sliding_attention"}
