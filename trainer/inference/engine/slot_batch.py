"""The rows that are being decoded, each in its own slot; prefixes that prompts share with earlier rows are kept.

A finished row stays in its slot until another needs it: the episode's next turn, which begins with the same tokens,
continues there. Members of a group, and prompts with the same examples, copy the shared prefix from a row that has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult
from rollgym.trainer.inference.engine.decoding import Drawn, ReplyRow, draw_tokens, mask_others
from rollgym.trainer.inference.engine.slots import SlotModel, rounded, rounded_columns
from rollgym.trainer.inference.engine.structured import Grammars
from rollgym.trainer.models.pictures import image_tensors

_LEAST_SHARED = 16
"""Tokens for which it pays to look elsewhere."""
_TOKENS_AT_ONCE = 16_384
"""Of prompts that one call of the model reads."""
_MASKED_AT_ONCE = 2**26
"""Pairs of tokens that one mask says of whether one sees the other."""
_NOTHING = -1
"""Stands where no token is."""
_COLUMNS = 64
"""Lengths are multiples of it."""

Part = tuple[list["SlotRow"], Tensor]
"""Rows, and the logits of their next tokens."""


@dataclass(slots=True, eq=False)
class SlotRow(ReplyRow):
    """The row of one reply in flight.

    Attributes:
        slot: Where its keys and values are; -1 as long as it has none.
        length: How many tokens' there are.
        sequence: What it has to read before its next token is drawn.
    """

    slot: int = _NOTHING
    length: int = 0
    sequence: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class SlotBatch:
    """Decodes rows together. Not thread-safe: one thread at a time.

    Args:
        model: The policy; `why_no_slots` must have found nothing.
        max_rows: Rows at once.
        max_length: Longest row in tokens.
        grammars: Compiled grammars of constrained replies; None if no reply is constrained.
        remembers: Whether rows that have left are looked at by those that come. If not, what is computed does not
            depend on what was computed before.

    Attributes:
        drawn: The token that each row drew in the last step, those included that then left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_rows: int,
        max_length: int,
        *,
        grammars: Grammars | None = None,
        remembers: bool = True,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._slots = SlotModel(model, max_length)
        self._max_rows = max_rows
        self._max_length = max_length
        self._remembers = remembers
        self.drawn: list[int] = []
        self._rows: list[SlotRow] = []
        # The token whose keys and values stand in each column of each slot, and when each slot's last row left.
        self._held: NDArray[np.int64] = np.full((0, 0), _NOTHING)
        self._left: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._clock = 0

    @torch.inference_mode()
    def advance(self, admitted: Sequence[GenerationRequest], version: int) -> list[tuple[int, Drawn]]:
        """Draw one token for every row, admitting new rows first.

        Args:
            admitted: Requests that join; their rows come after those that are there.
            version: Policy version that draws the tokens.

        Returns:
            Row and reply of those that are finished. They have left: the rows behind them move up.
        """
        self._clock += 1
        drawn: dict[int, tuple[int, float]] = {}
        if self._rows:
            drawn |= _drawn(self._decode())
        for part in self._admit([SlotRow.begun(each, self._grammars) for each in admitted]):
            drawn |= _drawn(part)
        self.drawn = [drawn[id(row)][0] for row in self._rows]
        finished: list[tuple[int, Drawn]] = []
        for index, row in enumerate(self._rows):
            result = row.take(*drawn[id(row)], version)
            if result is not None:
                finished.append((index, result))
        self.remove([index for index, _ in finished])
        return finished

    @torch.inference_mode()
    def remove(self, indices: Sequence[int]) -> None:
        """Remove rows from the batch, and free their slots."""
        gone = set(indices)
        for index in gone:
            row = self._rows[index]
            if row.slot == _NOTHING:
                continue  # it was given back
            self._left[row.slot] = self._clock if self._remembers else 0
            if not self._remembers:
                self._held[row.slot] = _NOTHING
            if row.logprobs and not isfinite(row.logprobs[-1]):
                self._held[row.slot] = _NOTHING
                self._slots.cache.clear([row.slot])
        self._rows = [row for index, row in enumerate(self._rows) if index not in gone]

    def take(self, indices: Sequence[int]) -> list[GenerationResult]:
        """Let rows leave with what they have."""
        rows = [self._rows[index] for index in indices]
        self.remove(indices)
        return [GenerationResult(row.ids, row.logprobs, row.versions, "abort") for row in rows]

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute all keys and values again, after the weights have changed."""
        self._slots.take_weights()
        self._held[:] = _NOTHING
        rows, self._rows = self._rows, []
        for row in rows:
            row.slot, row.length = _NOTHING, 0
        # The last token of a row is not in its slot: it is what the next step reads.
        for _ in self._admit(rows, upto=-1):
            pass

    @property
    def is_released(self) -> bool:
        """Whether rows are under way whose keys and values were given back."""
        return any(row.slot == _NOTHING for row in self._rows)

    @torch.inference_mode()
    def release(self) -> None:
        """Give back the memory of all keys and values; `recompute` computes those of rows under way again."""
        self._slots.release()
        self._held = np.full((0, 0), _NOTHING)
        self._left = np.zeros(0, dtype=np.int64)
        for row in self._rows:
            row.slot, row.length = _NOTHING, 0

    def _decode(self) -> Part:
        """Run one more token of every row."""
        self._make_room(len(self._rows), max(row.length for row in self._rows) + 1)
        count = self._count(len(self._rows))
        self._bring_to_front(count)
        rows = sorted(self._rows, key=lambda row: row.slot)
        slots = [row.slot for row in rows]
        tokens = np.zeros((3, count), dtype=np.int64)
        tokens[1] = self._slots.cache.columns  # unused rows write behind the columns that are read
        tokens[:, slots] = np.array([(row.ids[-1], row.length, row.length + row.shift) for row in rows]).T
        self._held[slots, tokens[1, slots]] = tokens[0, slots]
        for row in rows:
            row.length += 1
        logits = self._slots.decode(torch.from_numpy(tokens), self._width(max(row.length for row in rows)))
        return rows, logits if count == len(rows) else logits[torch.tensor(slots, device=logits.device)]

    def _admit(self, rows: list[SlotRow], upto: int | None = None) -> Iterator[Part]:
        """Read whole prompts (and what was drawn so far)."""
        if not rows:
            return
        first: dict[tuple[object, ...], list[SlotRow]] = {}
        for row in rows:
            ids = (row.request.prompt_ids + row.ids)[:upto]
            row.sequence = np.array(ids, dtype=np.int64)
            first.setdefault((tuple(ids), row.request.images), []).append(row)
        self._make_room(len(self._rows) + len(rows), max(len(row.sequence) for row in rows))
        self._rows = [*self._rows, *rows]
        alike = {id(members[0]): members for members in first.values()}
        for wave in self._waves([members[0] for members in first.values()]):
            for leaders, logits in self._prefill(wave):
                yield self._joined([alike[id(each)] for each in leaders], logits)

    def _joined(self, groups: list[list[SlotRow]], logits: Tensor) -> Part:
        """Give rows that read the same what the first of them has read."""
        rows = [row for group in groups for row in group]
        if len(rows) == len(groups):
            return rows, logits
        followers = [(group[0], row) for group in groups for row in group[1:]]
        self._place(
            [row for _, row in followers],
            [(leader.slot, leader.length) for leader, _ in followers],
        )
        for leader, row in followers:
            row.shift = leader.shift
        which = [number for number, group in enumerate(groups) for _ in group]
        return rows, logits[torch.tensor(which, device=logits.device)]

    def _waves(self, rows: list[SlotRow]) -> list[list[SlotRow]]:
        """Return rows in the order in which they are read: those that share more with others of them come second."""
        first: list[SlotRow] = []
        second: list[SlotRow] = []
        ids: NDArray[np.int64] = np.full((len(rows), max(len(row.sequence) for row in rows)), _NOTHING)
        for row in rows:
            _, beside = _longest(ids[: len(first)], row)
            if beside >= self._match(row)[1] + _LEAST_SHARED:
                second.append(row)
                continue
            if not row.request.images:
                ids[len(first), : len(row.sequence)] = row.sequence
            first.append(row)
        return [first, second] if second else [first]

    def _match(self, row: SlotRow) -> tuple[int, int]:
        """Return the slot that shares most of what a row reads from its beginning, and how many tokens that is."""
        slot, shared = _longest(self._held, row)
        return (slot, shared) if shared >= _LEAST_SHARED else (_NOTHING, 0)

    def _prefill(self, rows: list[SlotRow]) -> Iterator[Part]:
        self._place(rows, [self._match(row) for row in rows])
        for part in [
            *_portions([row for row in rows if not row.length]),
            *_portions([row for row in rows if row.length]),
        ]:
            yield part, self._read(part)

    def _place(self, rows: list[SlotRow], matches: list[tuple[int, int]]) -> None:
        """Give rows slots, and what these or others hold of what they read."""
        taken = {row.slot for row in self._rows}
        longest_first = sorted(zip(rows, matches, strict=True), key=lambda each: -each[1][1])
        for row, (source, shared) in longest_first:
            if shared and source not in taken:
                row.slot = source
                taken.add(source)
        free = [slot for slot in np.argsort(self._left, kind="stable").tolist() if slot not in taken]
        homeless = [row for row in rows if row.slot == _NOTHING]
        for row, slot in zip(homeless, free[: len(homeless)], strict=True):
            row.slot = slot
        self._copy(longest_first)
        for row, (_, shared) in longest_first:
            row.length = shared
            self._held[row.slot] = _NOTHING
            if not row.request.images:
                self._held[row.slot, :shared] = row.sequence[:shared]

    def _copy(self, wanted: list[tuple[SlotRow, tuple[int, int]]]) -> None:
        copies = [
            (source, row.slot, shared) for row, (source, shared) in wanted if shared and source != row.slot
        ]
        if copies:
            sources, targets, shared = zip(*copies, strict=True)
            self._slots.cache.copy(sources, targets, max(shared))

    def _read(self, rows: list[SlotRow]) -> Tensor:
        """Read what rows have not read yet."""
        new = [row.sequence[row.length :] for row in rows]
        size = max(map(len, new))
        ids = np.zeros((len(rows), size), dtype=np.int64)
        columns = np.full((len(rows), size), self._slots.cache.columns)
        for number, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            ids[number, : len(tokens)] = tokens
            columns[number, : len(tokens)] = np.arange(row.length, len(row.sequence))
            if not row.request.images:
                self._held[row.slot, row.length : len(row.sequence)] = tokens
        width = max(len(row.sequence) for row in rows) if rows[0].length else 0
        given = torch.from_numpy(ids)
        shown = image_tensors(self._model, given, [row.request.images for row in rows])
        logits = self._slots.read(
            given,
            torch.from_numpy(columns),
            [row.slot for row in rows],
            [len(tokens) - 1 for tokens in new],
            width,
            shown,
        )
        for number, row in enumerate(rows):
            row.length = len(row.sequence)
            if shown is not None:
                row.shift = shown.shifts[number]
        return logits

    # Where slots are

    def _count(self, rows: int) -> int:
        """Return of how many of the first slots a step is made."""
        return min(rounded(rows), self._slots.cache.slots) if self._slots.captures else rows

    def _width(self, longest: int) -> int:
        """Return how many columns a step reads."""
        width = rounded_columns(longest) if self._slots.captures else -(-longest // _COLUMNS) * _COLUMNS
        return min(width, self._slots.cache.columns)

    def _make_room(self, rows: int, longest: int) -> None:
        """Have slots for some rows, and columns for the longest of them."""
        cache = self._slots.cache
        if rows <= cache.slots and longest <= cache.columns:
            return
        longest = max([longest, *(row.length for row in self._rows)])
        columns = max(min(rounded_columns(longest), self._max_length), longest)
        # What has left is kept as long as it takes no more than what is there.
        slots = max(min(rounded(rows), self._max_rows), min(cache.slots, 2 * rows), rows)
        self._bring_to_front(len(self._rows))
        self._slots.resize(slots, columns)
        self._held = _resized(self._held, (slots, columns), _NOTHING)
        self._left = _resized(self._left, (slots,), 0)

    def _bring_to_front(self, count: int) -> None:
        """Exchange slots so that all rows are in the first ones."""
        outside = [row for row in self._rows if row.slot >= count]
        if not outside:
            return
        taken = {row.slot for row in self._rows}
        inside = [slot for slot in range(count) if slot not in taken][: len(outside)]
        far = [row.slot for row in outside]
        self._slots.cache.copy([*far, *inside], [*inside, *far], self._slots.cache.columns)
        for table in (self._held, self._left):
            table[[*inside, *far]] = table[[*far, *inside]]
        for row, slot in zip(outside, inside, strict=True):
            row.slot = slot


def _resized(table: NDArray[np.int64], shape: tuple[int, ...], filling: int) -> NDArray[np.int64]:
    resized: NDArray[np.int64] = np.full(shape, filling)
    kept = tuple(slice(min(sizes)) for sizes in zip(table.shape, shape, strict=True))
    resized[kept] = table[kept]
    return resized


def _longest(held: NDArray[np.int64], row: SlotRow) -> tuple[int, int]:
    """Return which of `held` shares most with what a row reads from its beginning, and how much; never all of it.

    Something must be left to read: the next token is drawn behind it.
    """
    ids = row.sequence[:-1][: held.shape[1]]
    if row.request.images or not len(ids) or not len(held):
        return _NOTHING, 0
    unlike = held[:, : len(ids)] != ids
    shared = np.where(unlike.any(axis=1), unlike.argmax(axis=1), len(ids))
    best = int(shared.argmax())
    return best, int(shared[best])


def _portions(rows: Sequence[SlotRow]) -> Iterator[list[SlotRow]]:
    """Yield rows of like lengths that are read together."""
    part: list[SlotRow] = []
    width = 1
    for row in sorted(rows, key=lambda row: len(row.sequence) - row.length):
        tokens = (len(row.sequence) - row.length) * (len(part) + 1)
        # Those that read on behind what is known have a mask: of each token, all that stands before it.
        width = max(width, len(row.sequence) if row.length else 1)
        if part and (tokens > _TOKENS_AT_ONCE or tokens * width > _MASKED_AT_ONCE):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _drawn(part: Part) -> dict[int, tuple[int, float]]:
    """Draw a token for each row; return it and its log-probability by the row's identity: slots may still change."""
    rows, logits = part
    mask_others(logits, rows)
    tokens, logprobs = draw_tokens(
        logits, [row.request.sampling for row in rows], [row.stream for row in rows]
    )
    return {id(row): each for row, each in zip(rows, zip(tokens, logprobs, strict=True), strict=True)}
