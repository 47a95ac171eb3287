"""Segments of a tree through a model: each reads the keys and values of those before it, and gradients flow back.

The model's own code is used as it is. It takes a cache as in decoding; ours gives it what the segments before have
computed, whole and with its graph, also where attention looks back no further than a window: the mask hides the rest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from rollgym.trainer.backends.prefix_layout import CallTensors, SharedTokens
from rollgym.trainer.backends.prefix_paths import Ids, paths_of
from rollgym.trainer.backends.prefix_tree import CallCosts, SharedRows, finest_tree, rows_apart
from rollgym.trainer.models.language_head import cache_argument, own_logits
from rollgym.trainer.models.packed_attention import take_packed_rows
from rollgym.trainer.models.trials import UNLIKE, why_no_cache_of_its_own, why_not_by_keys_and_values

KeysAndValues = tuple[Tensor, Tensor]
"""Of the tokens of one call in one layer, `[rows, heads, tokens, width]` each."""


class _PrefixLayer(CacheLayerMixin):
    """The cache of one layer for one call.

    It may be asked more than once, with the same keys and values: activations that were not kept are computed again.

    Args:
        sources: Keys and values that the prefix is taken from.
        index: Indices of each row's prefix among them; None without a prefix.
    """

    is_sliding = False

    def __init__(self, sources: Sequence[KeysAndValues], index: Tensor | None) -> None:
        super().__init__()
        self._sources = sources
        self._index = index
        self.own: KeysAndValues | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to prepare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the prefix's keys and values with those of the call behind them."""
        if self.own is None:
            self.own = key_states, value_states
        if self._index is None:
            return key_states, value_states
        return (
            torch.cat([_taken([keys for keys, _ in self._sources], self._index), key_states], dim=-2),
            torch.cat([_taken([values for _, values in self._sources], self._index), value_states], dim=-2),
        )

    def get_seq_length(self) -> int:
        """Return the tokens before the call's."""
        return 0 if self._index is None else self._index.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there are, and the index of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for an unbounded cache."""
        return -1


def _taken(sources: Sequence[Tensor], index: Tensor) -> Tensor:
    """Return tokens of `[rows, heads, tokens, width]` at indices among all of them, `[rows, heads, indices, width]`."""
    heads = sources[0].shape[1]
    table = torch.cat([source.transpose(1, 2).flatten(0, 1).flatten(1) for source in sources])
    # An embedding's backward adds up the gradients of a token that many rows read faster than an index's does.
    return functional.embedding(index, table).unflatten(-1, (heads, -1)).transpose(1, 2)


def hidden_states(body: PreTrainedModel, calls: Sequence[CallTensors]) -> Tensor:
    """Return the last hidden states that are wanted, `[n, width]`, in the order of the calls.

    Raises:
        RuntimeError: If the model did not read or write the cache that it was given.
    """
    wanted: list[Tensor] = []
    written: list[list[KeysAndValues]] = []
    name = cache_argument(body)
    for call in calls:
        cache = _cache(body, call, written) if call.is_read or call.prefix is not None else None
        given: dict[str, Any] = {} if cache is None else {name: cache}
        given["attention_mask"] = None if call.prefix is None else call.prefix.mask
        if call.packed is not None:
            given |= call.packed.arguments(body)
        states = body(
            input_ids=call.ids, position_ids=call.positions, use_cache=False, **given
        ).last_hidden_state
        wanted.append(states.flatten(0, 1)[call.states])
        written.append([] if cache is None else _written(cache, is_read=call.is_read))
    return torch.cat(wanted)


def logits_of_calls(model: PreTrainedModel, calls: Sequence[CallTensors]) -> Tensor:
    """Return the logits of the model's own forward that are wanted, `[n, vocabulary]`, in the order of the calls.

    For models whose logits are made of more than their last hidden states: no call of theirs has a prefix.
    """
    return torch.cat([_own_logits(model, call) for call in calls])


def _own_logits(model: PreTrainedModel, call: CallTensors) -> Tensor:
    width = call.ids.shape[1]
    return own_logits(model, call.ids, call.states // width, call.states % width)


def _cache(body: PreTrainedModel, call: CallTensors, written: Sequence[Sequence[KeysAndValues]]) -> Cache:
    """Return the cache of a call."""
    depth = body.config.get_text_config().num_hidden_layers
    sources = () if call.prefix is None else call.prefix.sources
    index = None if call.prefix is None else call.prefix.index
    return Cache(
        layers=[_PrefixLayer([written[each][layer] for each in sources], index) for layer in range(depth)]
    )


def _written(cache: Cache, *, is_read: bool) -> list[KeysAndValues]:
    """Return what a call left in its cache, if later ones read it."""
    written = [
        layer.own for layer in cache.layers if isinstance(layer, _PrefixLayer) and layer.own is not None
    ]
    if len(written) != len(cache.layers):
        raise RuntimeError("the model passed over the cache that it was given")
    return written if is_read else []


def take_replays(body: PreTrainedModel) -> None:
    """Let a model use our cache with activation checkpointing: recomputing reads the cache twice, which it allows."""
    for module in body.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module._can_checkpoint_with_cache = True


@torch.no_grad()
def why_not_shared(body: PreTrainedModel) -> str | None:
    """Return why a model cannot compute segments behind a prefix exactly, or None if it can.

    What its settings do not rule out is tried on a few tokens, in a tree of three levels.
    """
    config = body.config.get_text_config()
    if (odd := why_no_cache_of_its_own(config)) is not None:
        return odd
    if "flash" in (attention := str(config._attn_implementation)):
        return f"its attention ({attention}) hides nothing between a prefix and the row behind it"
    if not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache"):
        return "this version of transformers is too old for it"
    try:
        return (
            None
            if _is_exact(body, packs=False)
            else "what it computes behind a prefix is not what it computes of whole rows"
        )
    except UNLIKE as error:
        return f"it cannot compute what stands behind a prefix ({error})"


@torch.no_grad()
def why_not_packed(body: PreTrainedModel) -> str | None:
    """Return why a model cannot compute rows that stand behind each other exactly, or None if it can.

    What its settings do not rule out is tried on a few tokens.
    """
    config = body.config.get_text_config()
    if (odd := why_not_by_keys_and_values(config)) is not None:
        return odd
    attention = str(config._attn_implementation)
    if attention != "sdpa" and "flash" not in attention:
        return f"its attention ({attention}) has no form for rows of unequal lengths"
    take_packed_rows()
    try:
        if not _is_exact(body, packs=True):
            return "what it computes of packed rows is not what it computes of each apart"
    except UNLIKE as error:
        return f"it cannot compute packed rows ({error})"
    return None


def _is_exact(body: PreTrainedModel, *, packs: bool) -> bool:
    """Whether states behind a prefix, or of packed rows, are those of whole rows, but for rounding."""
    size = body.config.get_text_config().vocab_size
    rows = [
        np.array([index * 7 + 3 for index in row]) % size
        for row in (range(9), [*range(4), 20, 21, 22], [*range(6), 30, 31, 32, 33], [*range(7), 40])
    ]
    if packs:
        shared = rows_apart([len(row) for row in rows])
        return _is_exact_of(body, rows, shared, packs=True)
    paths = paths_of(rows)
    # Where calls are dear, all segments of a level are padded to one: that is tried, too.
    shared = finest_tree(paths, [len(rows[row]) for row in paths.row], CallCosts(0.0, 0.0, 0.0, 1e6, 0.0))
    return _is_exact_of(body, rows, shared, packs=False)


def _is_exact_of(body: PreTrainedModel, rows: Sequence[Ids], shared: SharedRows, *, packs: bool) -> bool:
    wanted = [np.arange(1, len(row)) for row in rows]
    tokens = SharedTokens.of(shared, [rows[row] for row in shared.paths], wanted, body.device, packs=packs)
    states = hidden_states(body, tokens.calls)[tokens.which].float()
    own = [
        body(input_ids=torch.from_numpy(row)[None].to(body.device), use_cache=False).last_hidden_state[0, :-1]
        for row in rows
    ]
    expected = torch.cat(own).float()
    error = ((states - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    return bool(error < (5e-2 if body.dtype == torch.bfloat16 else 1e-4))
