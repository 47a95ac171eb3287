"""Keys and values in slots: one for each row, filled from its first column on and written in place.

A layer holds `[slots, columns, heads, width]`. A decoding step reads the first slots up to some column, which is a
view: nothing of the size of what is held is copied. Behind the columns that are read stands one more, into which
padding is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_SMALLEST = 64
"""Columns; lengths are rounded so that shapes repeat."""


def rounded(number: int, smallest: int = 1) -> int:
    """Return the next of `smallest` times 1, 2, 3, 4, 6, 8, 12, 16 and so on: at most half more."""
    size = smallest
    while size < number:
        size *= 2
    return size * 3 // 4 if size // 4 * 3 >= number and size >= 4 * smallest else size


def rounded_columns(number: int) -> int:
    """Return a length that shapes are made of."""
    return rounded(number, _SMALLEST)


@dataclass(slots=True)
class SlotCall:
    """What one call of the model reads and writes.

    Attributes:
        places: Where its keys and values are written, of all columns of all slots in order, `[rows * new]`.
        width: Columns that its rows read, their own included; 0 if they read only what the call itself computes.
        slots: Slots of its rows, `[rows]`; the first ones if None.
        rows: How many there are.
    """

    places: Tensor
    width: int
    rows: int
    slots: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """The slots of one layer, as the library's models write and read them."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.call: SlotCall | None = None
        self.size = (0, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for keys and values such as these."""
        self.keys, self.values = (
            states.new_zeros(self.size[0], self.size[1] + 1, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write what a call computes, and return what its rows read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        call = self._current()
        for held, states in self._pairs(key_states, value_states):
            held.flatten(0, 1).index_copy_(0, call.places, states.transpose(1, 2).flatten(0, 1))
        if not call.width:
            return key_states, value_states
        keys, values = (self._read(held, call) for held in self.tensors)
        return keys, values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, `[slots, columns + 1, heads, width]`; none before the first call."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def get_seq_length(self) -> int:
        """Return the columns before the call's."""
        call = self._current()
        return max(call.width - len(call.places) // call.rows, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a call reads, and the index of the first."""
        return self._current().width or query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for an unbounded cache: slots grow."""
        return -1

    def _pairs(self, *states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.tensors, states, strict=True)

    @staticmethod
    def _read(held: Tensor, call: SlotCall) -> Tensor:
        part = held[: call.rows, : call.width] if call.slots is None else held[call.slots, : call.width]
        return part.transpose(1, 2)

    def _current(self) -> SlotCall:
        if self.call is None:
            raise RuntimeError("slots are read outside a call")
        return self.call


class SlotCache:
    """All layers' slots.

    Args:
        depth: Layers.

    Attributes:
        slots: How many there are.
        columns: Tokens that each of them can hold.
    """

    def __init__(self, depth: int) -> None:
        self._layers = [SlotLayer() for _ in range(depth)]
        self._cache = Cache(layers=list(self._layers))
        self.slots = self.columns = 0

    def during(self, call: SlotCall) -> Cache:
        """Return what the model is given as its cache for a call."""
        for layer in self._layers:
            layer.call = call
        return self._cache

    @property
    def written(self) -> bool:
        """Whether every layer has written keys and values."""
        return all(layer.is_initialized for layer in self._layers)

    def resize(self, slots: int, columns: int) -> None:
        """Have room for some slots of some columns; what they hold stays, as far as there is room."""
        for layer in self._layers:
            layer.size = (slots, columns)
            if layer.tensors:
                layer.keys, layer.values = (_resized(held, slots, columns + 1) for held in layer.tensors)
        self.slots, self.columns = slots, columns

    def release(self) -> None:
        """Give back the memory of all slots: there are none until the next `resize`."""
        for layer in self._layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
            layer.call = None
        self.resize(0, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first columns of slots into others; all are read before one is written."""
        for layer in self._layers:
            for held in layer.tensors:
                read = torch.tensor(sources, device=held.device)
                held[torch.tensor(targets, device=held.device), :columns] = held[read, :columns]

    def clear(self, slots: Sequence[int] | None = None) -> None:
        """Write zeros into slots, all if None: a masked NaN would still be NaN, since 0 times NaN is NaN."""
        for layer in self._layers:
            for held in layer.tensors:
                if slots is None:
                    held.zero_()
                else:
                    held[torch.tensor(slots, device=held.device)] = 0


def _resized(held: Tensor, slots: int, columns: int) -> Tensor:
    wider = held.new_zeros(slots, columns, *held.shape[2:])
    kept = min(slots, held.shape[0]), min(columns, held.shape[1]) - 1
    wider[: kept[0], : kept[1]] = held[: kept[0], : kept[1]]
    return wider
