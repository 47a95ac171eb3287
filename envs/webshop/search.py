"""The search engine: BM25 over an inverted index on disk, scored as Lucene scores it."""

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.envs.webshop.columns import SortedKeys, read_array, write_array, write_sorted_keys
from rollgym.envs.webshop.words import words_of

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
