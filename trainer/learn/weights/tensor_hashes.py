"""Checksums of tensors, as SGLang (0.5.23) computes them: by SHA-256 on a processor, by tiles on an accelerator."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

HashKind = Literal["sha256", "tiles"]

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_TILE = 8192
"""Words whose hashes are added up before they are mixed again."""
_AT_ONCE = 512 * _TILE
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
    for start in range(0, count, _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        halves = [_mixed_tiles(part, start, 4 * count, *stream) for stream in _STREAMS]
        # Two halves of a number that no int64 holds: they are added up apart, and the carry with them.
        high, low = (int(half.sum()) for half in halves)
        total += (high << 32) + low
    return f"{_finished(total & _LONG) if count else 0:016x}"


HASHES: Mapping[HashKind, Callable[[Tensor], str]] = {"sha256": sha256_hash, "tiles": tile_hash}


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
