"""Positions of the tokens of a tree's segments in calls of a model, as the tensors of the calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollgym.trainer.backends.prefix_paths import Ids
from rollgym.trainer.backends.prefix_tree import Call, SharedRows, Tree
from rollgym.trainer.models.packed_attention import PackedRows


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

    def _is_packed(self, call: Call) -> bool:
        return self._packs and not call.prefix

    def _size(self, call: Call) -> int:
        return sum(self._tree.lengths(call)) if self._is_packed(call) else len(call.segments) * call.width

    def _firsts(self, call: Call) -> list[int]:
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
