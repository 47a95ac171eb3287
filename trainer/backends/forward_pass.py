"""Rows through a model: split into micro-batches, moved to its device, with results at the wanted tokens only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rollgym.trainer.backends.base import EntropyMode, MicroBatch, RoutedOutputs, TokenCounts, TrainRow
from rollgym.trainer.backends.batching import Plans, RowBucket, length_buckets, packed_buckets, pad_rows
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.prefix_cache import SharedTokens
from rollgym.trainer.backends.prefix_tree import CallCosts, rows_apart
from rollgym.trainer.backends.routing import packed_experts
from rollgym.trainer.models.packed_attention import take_packed_rows
from rollgym.trainer.models.pictures import image_tensors


class ForwardPass:
    """Computes outputs of rows.

    Args:
        head: The model and what is read off it.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        costs: Costs of the model's calls: a shared prefix of rows goes through the model once if that is cheaper.
            None: prefixes are not shared.
        plans: Plans of rows that other models compute too; its own if None.
        packs: Whether rows are computed behind each other, without padding.
    """

    def __init__(
        self,
        head: Head,
        tokens_per_micro_batch: int,
        costs: CallCosts | None = None,
        plans: Plans | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self._head = head
        self._tokens = tokens_per_micro_batch
        if packs:
            take_packed_rows()
        self._packs = packs
        self._costs = costs if costs is None else replace(costs, packs=packs)
        self._plans = plans or Plans()
        self._reads = head.reads
        self._prefixes = costs is not None and head.why_not_shared is None
        self._experts: KeptExperts | None = None

    @property
    def shares(self) -> bool:
        """Whether a shared prefix of rows goes through the model once if that is cheaper."""
        return self._costs is not None

    @property
    def tokens_per_micro_batch(self) -> int:
        """Most tokens of a micro-batch, padding included."""
        return self._tokens

    def halve(self) -> None:
        """Have micro-batches of half as many tokens from now on."""
        self._tokens = max(1, self._tokens // 2)

    @property
    def packs(self) -> bool:
        """Whether rows are computed behind each other, without padding."""
        return self._packs

    @property
    def why_not_shared(self) -> str | None:
        """Why they do so only where a row is the beginning of another one; None if they do wherever it pays."""
        return self._head.why_not_shared if self.shares else None

    @property
    def model(self) -> nn.Module:
        """The model that the head computes with."""
        return self._head.model

    @property
    def device(self) -> torch.device:
        """The device that holds the model's parameters."""
        return next(self._head.model.parameters()).device

    def outputs(self, rows: Sequence[TrainRow], entropy: EntropyMode = "none") -> list[Tensor]:
        """Return the outputs of each row, or its entropies, float32 `[tokens]` on the processor, without gradient."""
        kept = KeptOutputs(rows, entropy=entropy != "none")
        with torch.no_grad():
            for bucket in self.buckets(rows):
                kept.add(self.run(rows, bucket, entropy))
        return kept.by_row()

    def routed(self, rows: Sequence[TrainRow]) -> RoutedOutputs:
        """Return what `outputs` does, and the experts that tokens took.

        Raises:
            ConfigError: If the model has none whose choice is known.
        """
        kept = KeptOutputs(rows)
        with torch.no_grad(), self.keeping_experts(rows) as experts:
            for bucket in self.buckets(rows, apart=True):
                kept.add(self.run(rows, bucket, "none"))
        return RoutedOutputs(kept.by_row(), experts.by_row())

    @contextmanager
    def keeping_experts(self, rows: Sequence[TrainRow]) -> "Iterator[KeptExperts]":
        """Hand out the experts that tokens of rows take while inside; they are there behind it.

        Raises:
            ConfigError: If the model has none whose choice is known.
        """
        self._head.keep_experts(wanted=True)
        self._experts = experts = KeptExperts(rows, self._head)
        try:
            yield experts
        finally:
            self._experts = None
            self._head.keep_experts(wanted=False)

    def buckets(self, rows: Sequence[TrainRow], *, apart: bool = False) -> list[RowBucket]:
        """Cut rows into micro-batches. Those with recorded experts or with pictures are computed padded, as they are.

        Args:
            rows: The rows.
            apart: Whether all of them are.
        """
        if any(row.images for row in rows):
            return self._buckets_beside_pictures(rows, apart=apart)
        lengths = [len(row.ids) for row in rows]
        if apart or any(row.experts is not None for row in rows):
            return [RowBucket(bucket, packs=False) for bucket in length_buckets(lengths, self._tokens)]
        if self._costs is None:
            cut = packed_buckets if self._packs else length_buckets
            return [RowBucket(bucket) for bucket in cut(lengths, self._tokens)]
        ids = [row.ids.numpy() for row in rows]
        return self._plans.plan(ids, self._tokens, self._costs, prefixes=self._prefixes)

    def _buckets_beside_pictures(self, rows: Sequence[TrainRow], *, apart: bool) -> list[RowBucket]:
        """Cut rows of which some hold pictures: equal ids may hide other pictures, so that those share nothing."""
        shown = [index for index, row in enumerate(rows) if row.images]
        plain = [index for index, row in enumerate(rows) if not row.images]
        parts = length_buckets([len(rows[index].ids) for index in shown], self._tokens)
        buckets = [RowBucket([shown[index] for index in part], packs=False) for part in parts]
        if plain:
            buckets += [
                each.of(plain) for each in self.buckets([rows[index] for index in plain], apart=apart)
            ]
        return buckets

    def tokens(self, rows: Sequence[TrainRow], buckets: Sequence[RowBucket | None]) -> TokenCounts:
        """Count the tokens of rows, and those of them that go through the model."""
        total = sum(len(row.ids) for row in rows)
        saved = sum(
            bucket.saved([len(rows[index].ids) for index in bucket.rows]) for bucket in buckets if bucket
        )
        return TokenCounts(total, total - saved)

    def run(
        self, rows: Sequence[TrainRow], bucket: RowBucket, entropy: EntropyMode, calls: int = 1
    ) -> MicroBatch:
        """Compute a micro-batch; logits only where the mask wants them, which on long prompts is most of the work.

        Args:
            rows: The batch.
            bucket: The micro-batch.
            entropy: Whether entropies are wanted.
            calls: Calls of the model to make at least, where several ranks have to make as many.
        """
        chosen = [rows[index] for index in bucket.rows]
        mask = pad_rows([row.mask for row in chosen])
        row, column = mask.nonzero(as_tuple=True)
        if bool((column == 0).any()):
            raise ValueError("the first token of a row cannot be trained on: nothing predicts it")
        device = self.device
        ids = pad_rows([each.ids for each in chosen])
        placed = [each.images for each in chosen]
        # A model that is divided over ranks has no body to ask, and sees none.
        images = image_tensors(self._head.body, ids, placed) if any(placed) else None
        ids = ids.to(device)
        row, column, mask = row.to(device), column.to(device), mask.to(device)
        fields = _fields(chosen, device)
        given: dict[str, Any] = {}
        if self._reads:
            given["fields"] = {name: fields[name][row, column] for name in self._reads}
        shared = self._shared(rows, bucket, calls)
        experts = packed_experts(chosen, ids.shape[1], device)
        if shared is not None and experts is not None:
            raise ValueError(
                "rows with recorded experts share no prefixes, and others of this batch do: set "
                "optimizer.shared_prefixes=off"
            )
        if images is not None:
            given["images"] = images
        values, entropies = self._head(ids, row, column, entropy, shared, experts, **given)
        if self._experts is not None and self._experts.rows is rows:
            self._experts.add(bucket.rows, self._head.kept_experts(*ids.shape))
        return MicroBatch(
            rows=torch.tensor(bucket.rows, device=device),
            mask=mask,
            outputs=_scattered(values, mask, row, column),
            entropy=None if entropies is None else _scattered(entropies, mask, row, column),
            fields=fields,
        )

    def _shared(self, rows: Sequence[TrainRow], bucket: RowBucket, calls: int) -> SharedTokens | None:
        shared, indices = bucket.shared, bucket.rows
        packs = self._packs and bucket.packs
        if shared is None and calls == 1 and not packs:
            return None
        if shared is None:
            shared = rows_apart([len(rows[index].ids) for index in indices])
        else:
            indices = shared.paths
        paths = [rows[index].ids.numpy() for index in indices]
        wanted = [rows[index].mask.numpy().nonzero()[0] for index in bucket.rows]
        return SharedTokens.of(shared, paths, wanted, self.device, calls, packs=packs)


class KeptOutputs:
    """What was computed of each row, put together of micro-batches.

    Args:
        rows: All rows that micro-batches are cut from.
        entropy: Whether the entropies are kept, and not the outputs.
    """

    def __init__(self, rows: Sequence[TrainRow], *, entropy: bool = False) -> None:
        self._rows = rows
        self._entropy = entropy
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, micro: MicroBatch) -> None:
        """Take in a micro-batch's outputs; its gradient's graph is not held."""
        numbers = micro.entropy if self._entropy else micro.outputs
        assert numbers is not None
        self._parts.append((micro.rows, numbers.detach()))

    def by_row(self) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]` on the processor."""
        results: list[Tensor] = [torch.empty(0)] * len(self._rows)
        for numbers, outputs in self._parts:
            for row, line in zip(numbers.tolist(), outputs.cpu(), strict=True):
                results[row] = line[: len(self._rows[row].ids)]
        return results


class KeptExperts:
    """The experts that tokens of rows took, put together of micro-batches.

    Args:
        rows: All rows that micro-batches are cut from.
        head: What knows those that others keep.
    """

    def __init__(self, rows: Sequence[TrainRow], head: Head) -> None:
        self.rows = rows
        self._head = head
        self._parts: list[tuple[Sequence[int], Tensor]] = []

    def add(self, indices: Sequence[int], experts: Tensor) -> None:
        """Take in what a micro-batch's rows took, `[rows, tokens, layers * taken]`."""
        self._parts.append((indices, experts))

    def by_row(self) -> list[Tensor]:
        """Return the experts of each row, int16 `[tokens, layers * taken]` on the processor."""
        results: list[Tensor] = [torch.empty(0)] * len(self.rows)
        for indices, experts in self._parts:
            for index, line in zip(indices, self._head.whole_experts(experts).cpu(), strict=True):
                results[index] = line[: len(self.rows[index].ids)].clone()
        return results


def _fields(rows: Sequence[TrainRow], device: torch.device) -> dict[str, Tensor]:
    """Return the rows' fields padded, brought to the device in one transfer for all of a type."""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, values in rows[0].fields.items():
        by_type.setdefault(values.dtype, []).append(name)
    fields: dict[str, Tensor] = {}
    for names in by_type.values():
        together = torch.stack([pad_rows([row.fields[name] for row in rows]) for name in names]).to(device)
        fields |= zip(names, together.unbind(), strict=True)
    return fields


def _scattered(values: Tensor, mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).index_put((row, column), values)
