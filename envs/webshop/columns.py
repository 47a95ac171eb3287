"""Columns on disk: arrays and texts that every process of a machine maps into its memory, and none has a copy of."""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_array(folder: Path, name: str, values: NDArray[Any]) -> None:
    """Write an array to a file of its own."""
    np.save(folder / f"{name}.npy", values, allow_pickle=False)


def read_array(folder: Path, name: str) -> NDArray[Any]:
    """Return an array that stays on disk until it is looked at."""
    # As a plain array: a numpy.memmap takes several times as long to index.
    values: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return values.view(np.ndarray)


def write_rows(folder: Path, name: str, rows: Iterable[bytes]) -> None:
    """Write rows of bytes one after another, and the end offset of each."""
    ends = [0]
    with (folder / f"{name}.rows").open("wb") as file:
        for row in rows:
            file.write(row)
            ends.append(ends[-1] + len(row))
    write_array(folder, f"{name}.ends", np.asarray(ends, dtype=np.int64))


class Rows(Sequence[bytes]):
    """Rows of bytes on disk, by their number."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ends = read_array(folder, f"{name}.ends")
        path = folder / f"{name}.rows"
        self._bytes: mmap.mmap | bytes = b""
        if path.stat().st_size:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}")
        return self._bytes[int(self._ends[index]) : int(self._ends[index + 1])]


class SortedKeys:
    """Texts in the order of their bytes, found by bisection."""

    def __init__(self, folder: Path, name: str) -> None:
        self._rows = Rows(folder, name)

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, key: str) -> int | None:
        """Return the number of a key; None if it is not there."""
        wanted = key.encode(errors="surrogatepass")
        index = bisect_left(self._rows, wanted)
        return index if index < len(self._rows) and self._rows[index] == wanted else None


def write_sorted_keys(folder: Path, name: str, keys: Iterable[str]) -> list[int]:
    """Write distinct keys in the order of their bytes; give for each, in the order they came, its index."""
    encoded = [key.encode(errors="surrogatepass") for key in keys]
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    write_rows(folder, name, (encoded[key_number] for key_number in order))
    indices = [0] * len(order)
    for index, key_number in enumerate(order):
        indices[key_number] = index
    return indices
