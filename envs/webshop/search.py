"""The search engine: BM25 over an inverted index on disk, scored as Lucene scores it.

Its columns on disk are arrays and texts that every process of a machine maps into its memory, without a copy.
"""

import mmap
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import snowballstemmer
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


# Runs of letters and digits; a point or comma between digits and an apostrophe or point between letters belong to them.
_TOKEN = re.compile(r"[^\W_]+(?:(?:(?<=\d)[.,](?=\d)|(?<=[^\W\d_])['’.](?=[^\W\d_]))[^\W_]+)*")
_STOP_WORD_LIST = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
_STOP_WORDS = frozenset(_STOP_WORD_LIST.split())
_stem = snowballstemmer.stemmer("porter").stemWord


def words_of(text: str) -> list[str]:
    """Return the stems of a text's words, in order, without stop words."""
    return [stem for token in _TOKEN.findall(text.lower()) if (stem := _stem_of(token))]


def words_and_stems(text: str) -> list[tuple[str, str]]:
    """Return a text's words in lower case with their stems, in order, without stop words."""
    return [(token, stem) for token in _TOKEN.findall(text.lower()) if (stem := _stem_of(token))]


@lru_cache(maxsize=2**18)
def _stem_of(token: str) -> str:
    """Return the stem of a word in lower case; nothing for a stop word."""
    word = token.removesuffix("'s").removesuffix("’s")
    return "" if word in _STOP_WORDS else str(_stem(word))


_K1, _B = 0.9, 0.4
# Lucene keeps a document's length in a byte: exact below 24, then with four significant bits.
_EXACT_LENGTHS = 24
_CHUNK_TOKENS = 20_000_000


class IndexWriter:
    """Collects documents and writes the index."""

    def __init__(self) -> None:
        self._terms: dict[str, int] = {}
        self._lengths = array("i")
        self._tokens = array("i")
        self._documents = array("i")
        self._postings: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []

    def add(self, text: str) -> None:
        """Index the next document, under the next number."""
        terms = self._terms
        found = [terms.setdefault(word, len(terms)) for word in words_of(text)]
        self._tokens.extend(found)
        self._documents.extend([len(self._lengths)] * len(found))
        self._lengths.append(len(found))
        if len(self._tokens) >= _CHUNK_TOKENS:
            self._condense()

    def write(self, folder: Path) -> None:
        """Write the index into a folder."""
        self._condense()
        indices = np.asarray(write_sorted_keys(folder, "terms", self._terms), dtype=np.int64)
        frequencies = np.zeros(len(indices), dtype=np.int64)
        for terms, _, _ in self._postings:
            frequencies += np.bincount(indices[terms], minlength=len(indices))
        starts = np.concatenate(([0], np.cumsum(frequencies)))
        documents = np.empty(int(starts[-1]), dtype=np.int32)
        scores = np.empty(int(starts[-1]), dtype=np.float32)
        norms = _norms(np.frombuffer(self._lengths, dtype=np.int32))
        count = max(1, len(norms))
        idf = np.log1p((count - frequencies + 0.5) / (frequencies + 0.5))
        used = starts[:-1].copy()
        # Chunks come in the order of their documents, so that every term's documents stay in order.
        for terms, owners, times in self._postings:
            rows = indices[terms]
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            counts = np.bincount(rows, minlength=len(indices))
            firsts = np.concatenate(([0], np.cumsum(counts)))[:-1]
            target = used[rows] + np.arange(len(rows)) - firsts[rows]
            owner, number = owners[order], times[order].astype(np.float64)
            documents[target] = owner
            scores[target] = idf[rows] * number / (number + norms[owner])
            used += counts
        write_array(folder, "posting_starts", starts)
        write_array(folder, "posting_documents", documents)
        write_array(folder, "posting_scores", scores)

    def _condense(self) -> None:
        """Count how often each term is in each document of the chunk."""
        if not self._tokens:
            return
        span = len(self._lengths)
        keys = np.frombuffer(self._tokens, dtype=np.int32).astype(np.int64) * span
        keys += np.frombuffer(self._documents, dtype=np.int32)
        unique, times = np.unique(keys, return_counts=True)
        terms, owners = np.divmod(unique, span)
        self._postings.append((terms.astype(np.int32), owners.astype(np.int32), times.astype(np.int32)))
        self._tokens, self._documents = array("i"), array("i")


class SearchIndex:
    """Full-text search over a written index."""

    def __init__(self, folder: Path, documents: int) -> None:
        self._count = documents
        self._terms = SortedKeys(folder, "terms")
        self._starts = read_array(folder, "posting_starts")
        self._documents = read_array(folder, "posting_documents")
        self._scores = read_array(folder, "posting_scores")

    def knows(self, word: str) -> bool:
        """Return whether a stem occurs in any document."""
        return self._terms.find(word) is not None

    def search(self, query: str, limit: int) -> list[int]:
        """Return the best documents, best first; of equally good ones the earlier comes first."""
        spans = []
        for word, times in sorted(Counter(words_of(query)).items()):
            index = self._terms.find(word)
            if index is not None:
                spans.append((slice(int(self._starts[index]), int(self._starts[index + 1])), times))
        if not spans:
            return []
        documents = np.concatenate([self._documents[span] for span, _ in spans])
        scores = np.concatenate([self._scores[span] * times for span, times in spans])
        totals = np.bincount(documents, weights=scores, minlength=self._count).astype(np.float32)
        found = np.flatnonzero(totals)
        if len(found) > limit:
            values = totals[found]
            least = np.partition(values, len(values) - limit)[len(values) - limit]
            found = found[values >= least]
        order = np.lexsort((found, -totals[found]))
        best: list[int] = found[order[:limit]].tolist()
        return best


def _norms(lengths: NDArray[np.int32]) -> NDArray[np.float64]:
    average = max(1.0, float(lengths.mean())) if len(lengths) else 1.0
    return np.asarray(_K1 * (1.0 - _B + _B * _kept_length(lengths) / average), dtype=np.float64)


def _kept_length(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return lengths as Lucene keeps them."""
    above = np.maximum(lengths.astype(np.int64) - _EXACT_LENGTHS, 0)
    bits = np.frexp(above.astype(np.float64))[1]
    shift = np.maximum(bits - 4, 0)
    return np.where(lengths < _EXACT_LENGTHS, lengths, _EXACT_LENGTHS + (above >> shift << shift))


def write_facets(folder: Path, keys: Iterable[Iterable[str]]) -> None:
    """Write which documents belong to each of some keys.

    Args:
        folder: The target folder.
        keys: Keys of every document, in order.
    """
    members: dict[str, list[int]] = {}
    for document, names in enumerate(keys):
        for name in dict.fromkeys(names):
            members.setdefault(name, []).append(document)
    indices = write_sorted_keys(folder, "facets", members)
    lists = [documents for _, documents in sorted(zip(indices, members.values(), strict=True))]
    write_array(folder, "facet_starts", np.cumsum([0, *map(len, lists)], dtype=np.int64))
    write_array(
        folder, "facet_documents", np.asarray([one for each in lists for one in each], dtype=np.int32)
    )


class Facets:
    """Finds documents by a key that they have or have not."""

    def __init__(self, folder: Path) -> None:
        self._keys = SortedKeys(folder, "facets")
        self._starts = read_array(folder, "facet_starts")
        self._documents = read_array(folder, "facet_documents")

    def find(self, key: str) -> list[int]:
        """Return the documents that have a key, in order."""
        index = self._keys.find(key)
        if index is None:
            return []
        return list(map(int, self._documents[self._starts[index] : self._starts[index + 1]]))
