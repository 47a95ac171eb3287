"""Segments of a tree through a model: each reads the keys and values of those before it, and gradients flow back.

The positions of a tree's segments are laid out as the tensors of calls of the model. The model's own code is used as it
is. It takes a cache as in decoding; ours gives it what the segments before have computed, whole and with its graph,
also where attention looks back no further than a window: the mask hides the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from rollgym.trainer.backends.prefix_tree import (
    CallCosts,
    Ids,
    ModelCall,
    SharedRows,
    Tree,
    finest_tree,
    paths_of,
    rows_apart,
)
from rollgym.trainer.models.language_head import (
    UNLIKE,
    cache_argument,
    own_logits,
    why_no_cache_of_its_own,
    why_not_by_keys_and_values,
)
from rollgym.trainer.models.packed_attention import PackedRows, take_packed_rows


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the rows of a call stand behind.

    Attributes:
        sources: Numbers of the calls that computed it.
        index: Indices of each row's prefix among the tokens of those calls, int64 `[rows, longest]`, padded on the
            left.
        mask: False where prefixes are padded, bool `[rows, longest + width]`; None if nothing is.
    """

    sources: Sequence[int]
    index: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class CallTensors:
    """One call of the model.

    Attributes:
        ids: Token ids, int64 `[rows, width]`; `[1, tokens]` if rows are packed.
        positions: Their positions in their rows; None if rows begin where the call's do.
        prefix: What they stand behind.
        is_read: Whether later calls read its keys and values.
        states: Indices of the states that are wanted, among its tokens, int64 `[n]`.
        packed: Boundaries of the packed rows; None if rows are padded.
    """

    ids: Tensor
    positions: Tensor | None
    prefix: Prefix | None
    is_read: bool
    states: Tensor
    packed: PackedRows | None = None


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of a micro-batch that are computed once, and those of its rows that they stand for.

    Attributes:
        calls: Calls of the model.
        targets: The distinct tokens that are wanted, in the order of the calls' states, int64 `[n]`.
        which: The distinct token that each wanted token of the rows is, int64 `[wanted]`.
    """

    calls: Sequence[CallTensors]
    targets: Tensor
    which: Tensor

    @classmethod
    def of(
        cls,
        shared: SharedRows,
        paths: Sequence[Ids],
        wanted: Sequence[Ids],
        device: torch.device,
        count: int = 1,
        *,
        packs: bool = False,
    ) -> Self:
        """Lay out a micro-batch.

        Args:
            shared: What its rows share.
            paths: Token ids of each path.
            wanted: Columns of each row's tokens that are wanted, never 0.
            device: Where the model is.
            count: Calls to make at least; superfluous ones compute a token whose result is dropped.
            packs: Whether rows without a prefix stand behind each other, without padding.
        """
        layout = _Layout(shared.tree, packs=packs)
        indices = [layout.indices(path) for path in range(len(paths))]
        tokens = [indices[path][columns] for path, columns in zip(shared.path_of, wanted, strict=True)]
        states = [indices[path][columns - 1] for path, columns in zip(shared.path_of, wanted, strict=True)]
        # Tokens of several rows are one if they are one in the tree. Ordered by the state that each is drawn from.
        keys = np.concatenate(states) * layout.size + np.concatenate(tokens)
        distinct, which = np.unique(keys, return_inverse=True)
        ids = layout.padded_ids(paths)
        state = distinct // layout.size
        bounds = np.searchsorted(state, [*layout.base, layout.size])

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        calls = [
            CallTensors(
                ids=tensor(ids[number]),
                positions=tensor(layout.positions(number)) if call.prefix or packs else None,
                prefix=layout.prefix(number, tensor) if call.prefix else None,
                is_read=not shared.tree.parents.isdisjoint(call.segments),
                states=tensor(state[bounds[number] : bounds[number + 1]] - layout.base[number]),
                packed=PackedRows.of(shared.tree.lengths(call), device)
                if packs and not call.prefix
                else None,
            )
            for number, call in enumerate(shared.tree.calls)
        ]
        flat = np.concatenate([each.ravel() for each in ids])
        one, none = np.zeros((1, 1), dtype=np.int64), np.zeros(0, dtype=np.int64)
        empty = CallTensors(tensor(one), None, None, is_read=False, states=tensor(none))
        calls += [empty] * (count - len(calls))
        return cls(calls, tensor(flat[distinct % layout.size]), tensor(which.ravel()))


class _Layout:
    """Where the tokens of a tree's segments lie in its calls, one call behind the other, padding included."""

    def __init__(self, tree: Tree, *, packs: bool) -> None:
        self._tree = tree
        self._packs = packs
        sizes = [self._size(call) for call in tree.calls]
        self.base = np.cumsum([0, *sizes])[:-1]
        self.size = sum(sizes)
        self._call = [0] * len(tree.segments)
        self._first = [0] * len(tree.segments)
        for number, call in enumerate(tree.calls):
            for segment, first in zip(call.segments, self._firsts(call), strict=True):
                self._call[segment] = number
                self._first[segment] = int(self.base[number]) + first

    def _is_packed(self, call: ModelCall) -> bool:
        return self._packs and not call.prefix

    def _size(self, call: ModelCall) -> int:
        return sum(self._tree.lengths(call)) if self._is_packed(call) else len(call.segments) * call.width

    def _firsts(self, call: ModelCall) -> list[int]:
        """Return where each segment of a call begins among its tokens."""
        if self._is_packed(call):
            return [0, *accumulate(self._tree.lengths(call)[:-1])]
        return [row * call.width for row in range(len(call.segments))]

    def indices(self, path: int) -> Ids:
        """Return where each token of a path is computed."""
        return np.concatenate([self._of(segment) for segment in self._tree.chain(path)])

    def _of(self, segment: int) -> Ids:
        of_tree = self._tree.segments[segment]
        return np.arange(self._first[segment], self._first[segment] + of_tree.stop - of_tree.start)

    def padded_ids(self, paths: Sequence[Ids]) -> list[Ids]:
        """Return the token ids of each call."""
        tables = []
        for call in self._tree.calls:
            if self._is_packed(call):
                of_call = (self._tree.segments[number] for number in call.segments)
                parts = [paths[each.path][each.start : each.stop] for each in of_call]
                tables.append(np.concatenate(parts)[None])
                continue
            table = np.zeros((len(call.segments), call.width), dtype=np.int64)
            for row, number in enumerate(call.segments):
                segment = self._tree.segments[number]
                table[row, : segment.stop - segment.start] = paths[segment.path][segment.start : segment.stop]
            tables.append(table)
        return tables

    def positions(self, number: int) -> Ids:
        """Return the positions of a call's tokens; padding stands where its row ends, which every model can place."""
        call = self._tree.calls[number]
        if self._is_packed(call):
            return np.concatenate([np.arange(length) for length in self._tree.lengths(call)])[None]
        segments = [self._tree.segments[segment] for segment in call.segments]
        starts = np.array([segment.start for segment in segments])[:, None]
        stops = np.array([segment.stop for segment in segments])[:, None]
        return np.minimum(starts + np.arange(call.width), stops - 1)

    def prefix(self, number: int, tensor: Callable[[NDArray[Any]], Tensor]) -> Prefix:
        """Return what a call's rows stand behind."""
        call = self._tree.calls[number]
        before = [self._before(segment) for segment in call.segments]
        sources = sorted({self._call[segment] for chain in before for segment in chain})
        sizes = [self._size(self._tree.calls[source]) for source in sources]
        moved = {
            source: int(start - self.base[source])
            for source, start in zip(sources, np.cumsum([0, *sizes]), strict=False)
        }
        index = np.zeros((len(call.segments), call.prefix), dtype=np.int64)
        mask = np.ones((len(call.segments), call.prefix + call.width), dtype=bool)
        for row, chain in enumerate(before):
            indices = np.concatenate([self._of(segment) + moved[self._call[segment]] for segment in chain])
            index[row, call.prefix - len(indices) :] = indices
            mask[row, : call.prefix - len(indices)] = False
        return Prefix(sources, tensor(index), None if mask.all() else tensor(mask))

    def _before(self, segment: int) -> list[int]:
        chain: list[int] = []
        while (segment := self._tree.segments[segment].parent) >= 0:
            chain.append(segment)
        return chain[::-1]


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
