"""Checks bit by bit, by the checksums that a server reports, whether it has the tensors that it was sent.

A server holds weights as it computes with them: several as one, padded, or in another order. So a tensor counts from
the first update on in which its checksum is what the trainer computes of its own; from then on another one is a fault.
What never is as the trainer computes it says nothing. Servers mostly start from the run's model, and are equal to it
then.

The checksums are those of SGLang (0.5.23): by SHA-256 on a processor, by tiles on an accelerator.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rollgym.trainer.backends.base import TrainBackend
from rollgym.trainer.inference.errors import WrongWeightsError

HashKind = Literal["sha256", "tiles"]

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_TILE = 8192
"""Words whose hashes are added up before they are mixed again."""
_WORDS_AT_ONCE = 512 * _TILE
_SEED = 0x243F6A88
_STREAMS = (
    (_SEED, 0x27D4EB2D, 15),
    ((_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD, 0x165667B1, 13),
)
"""Of the two halves: what is added to a position, what it is multiplied by, and by how much it is rotated."""


def sha256_hash(tensor: Tensor) -> str:
    """Return the first eight bytes of a tensor's SHA-256, in hexadecimal."""
    data = _bytes(tensor).cpu().numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()


def tile_hash(tensor: Tensor) -> str:
    """Return a tensor's hash by tiles of 8,192 words of 32 bits, in hexadecimal; computed where the tensor is."""
    words = _words(tensor)
    count = len(words)
    total = 0
    for start in range(0, count, _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        halves = [_mixed_tiles(part, start, 4 * count, *stream) for stream in _STREAMS]
        # Two halves of a number that no int64 holds: they are added up apart, and the carry with them.
        high, low = (int(half.sum()) for half in halves)
        total += (high << 32) + low
    return f"{_finished(total & _LONG) if count else 0:016x}"


_HASHES: Mapping[HashKind, Callable[[Tensor], str]] = {"sha256": sha256_hash, "tiles": tile_hash}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    data = _bytes(tensor)
    if missing := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    # A view of larger numbers wants an aligned beginning.
    return (data if data.storage_offset() % 4 == 0 else data.clone()).view(torch.int32)


def _mixed_tiles(words: Tensor, start: int, size: int, added: int, factor: int, turn: int) -> Tensor:
    """Return one half of the hash of each tile, `[tiles]`; products that overflow keep their last 32 bits."""
    at = torch.arange(start, start + len(words), device=words.device) & _WORD
    place = ((at * factor + added) & _WORD) ^ (((at << turn) | (at >> (32 - turn))) & _WORD)
    mixed = _mixed((words.long() & _WORD) ^ place)
    mixed = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE))
    return _mixed((mixed.view(-1, _TILE).sum(-1) & _WORD) ^ (size & _WORD))


def _mixed(words: Tensor) -> Tensor:
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _WORD
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def _finished(number: int) -> int:
    number ^= number >> 30
    number = (number * 0xBF58476D1CE4E5B9) & _LONG
    number ^= number >> 27
    number = (number * 0x94D049BB133111EB) & _LONG
    return number ^ (number >> 31)


NamedTensor = tuple[str, Tensor]

_FUSED: Mapping[str, tuple[str, int, int]] = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
"""Modules that servers hold as one: its name, the place in it, and how many there are."""
_PADDED_ROWS = 64
"""Servers pad vocabularies to multiples of this."""
_BYTES_AT_ONCE = 2**30
_SHOWN = 3


@runtime_checkable
class ReportsChecksums(Protocol):
    """A client of a server that may report checksums of its tensors."""

    async def checksums(self) -> Mapping[str, str] | None:
        """Return the checksum of each tensor by its name; None where the server has none."""
        ...


class ChecksumCheck:
    """Compares checksums that servers report with those of the trainer's weights, one version at a time.

    Args:
        dtype: Number format of the servers' weights.
        arrange: Makes of the trainer's tensors those that servers are sent.
        bytes_at_once: Checksums of at least so many bytes of weights are computed for one version; the next version
            continues with the weights behind them.

    Attributes:
        compared: Tensors of the server with the fewest whose checksum was the trainer's, in this version.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        arrange: Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]] = iter,
        bytes_at_once: int = _BYTES_AT_ONCE,
    ) -> None:
        self._dtype = dtype
        self._arrange = arrange
        self._bytes_at_once = bytes_at_once
        self._kinds: tuple[HashKind, ...] = ("sha256", "tiles")
        self._seen: set[HashKind] = set()
        self._first = self._next = 0
        self._version = 0
        self._backend: TrainBackend | None = None
        self._computing = asyncio.Lock()
        self._expected: dict[str, dict[str, HashKind]] = {}
        self._asked_of: set[str] = set()
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        self.compared: int | None = None

    def begin(self, version: int, backend: TrainBackend) -> None:
        """The trainer's weights are those of `version`, until `end`."""
        self._version, self._backend = version, backend
        self._expected, self._asked_of, self.compared = {}, set(), None
        self._first = self._next
        if self._seen:
            self._kinds = tuple(sorted(self._seen))

    async def end(self) -> None:
        """Training resumes: checksums computed for this version stay valid, and no more can be computed.

        Those that are being computed are waited for.
        """
        try:
            async with self._computing:
                pass
        finally:
            self._backend = None

    async def __call__(self, name: str, client: object) -> None:
        """Ask a server.

        Args:
            name: The server's; for people.
            client: Talks to it.

        Raises:
            WrongWeightsError: If a tensor is another one.
        """
        served = await client.checksums() if isinstance(client, ReportsChecksums) else None
        if served is None:
            return
        await self._compute(served.keys())
        equal = {each for each, sums in self._expected.items() if served.get(each) in sums}
        wrong = sorted((self._known[name] & self._expected.keys()) - equal)
        if wrong:
            shown = ", ".join(wrong[:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
            raise WrongWeightsError(
                f"{name} took the weights of version {self._version} and holds others: checksums of {len(wrong)} of "
                f"{len(self._expected)} tensors are not the trainer's ({shown}). Where the server was started again "
                "in another way, begin the run again, or set weights.checksums=false"
            )
        self._known[name] |= equal
        self._seen |= {self._expected[each][served[each]] for each in equal}
        self.compared = len(equal) if self.compared is None else min(self.compared, len(equal))

    async def _compute(self, names: Collection[str]) -> None:
        """Compute what a server's tensors should have, unless that is known."""
        async with self._computing:
            missing = set(names) - self._asked_of
            if not missing or self._backend is None:
                return
            found = await asyncio.to_thread(self._of_window, self._backend, missing)
            self._expected |= found
            self._asked_of |= missing

    def _of_window(self, backend: TrainBackend, names: Collection[str]) -> dict[str, dict[str, HashKind]]:
        found: dict[str, dict[str, HashKind]] = {}
        size = 0
        self._next = 0
        for index, (name, tensor) in enumerate(as_served(self._arrange(backend.export()))):
            if index < self._first or name not in names:
                continue
            if size >= self._bytes_at_once:
                self._next = index
                break
            size += tensor.numel() * tensor.element_size()
            found[name] = self._sums(tensor.to(self._dtype))
        return found

    def _sums(self, tensor: Tensor) -> dict[str, HashKind]:
        return {_HASHES[kind](each): kind for each in _layouts(tensor) for kind in self._kinds}


def as_served(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield tensors by their own names, and what servers make of several of them behind the last one.

    Args:
        tensors: The trainer's.
    """
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    layer = ""
    for name, tensor in tensors:
        yield name, tensor
        owner, _, rest = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        if module not in _FUSED:
            continue
        if parent != layer:
            # Some models have but one of them: it is not held to the end.
            parts.clear()
            layer = parent
        fused, place, count = _FUSED[module]
        whole = f"{parent}.{fused}.{rest}"
        parts[whole][place] = tensor
        if len(parts[whole]) == count:
            held = parts.pop(whole)
            yield whole, torch.cat([held[each] for each in range(count)])


def _layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as it is, and with the rows of nothing that servers put behind a vocabulary's."""
    yield tensor
    if tensor.dim() == 2 and (missing := -len(tensor) % _PADDED_ROWS):
        yield torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
