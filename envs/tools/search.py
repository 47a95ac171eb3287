"""Search over a small corpus that is held in memory, ranked by BM25."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.envs.tools.tool import Tool, tool_parameters

_WORD = re.compile(r"\w+")
_SATURATION, _LENGTH_WEIGHT = 1.2, 0.75
MOST_RESULTS = 10


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus, with its title."""

    title: str
    text: str


class Corpus:
    """A set of documents with full-text search."""

    def __init__(self) -> None:
        self.fill(())

    def fill(self, documents: Sequence[Document]) -> None:
        """Replace all documents, and rebuild the index."""
        self._documents = tuple(documents)
        self._counts = [Counter(_words(f"{each.title} {each.text}")) for each in documents]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0
        self._holding = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str, count: int) -> list[Document]:
        """Return the documents that fit best, the best first; those that share no word are left out."""
        words = set(_words(query))
        # Sums depend on their order, and the order of a set on the process.
        scores = [self._score(number, sorted(words)) for number in range(len(self._documents))]
        ranked = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
        return [self._documents[number] for _, number in ranked[:count]]

    def tool(self) -> Tool:
        """Return the tool that searches it."""
        return Tool(
            "search",
            "Search the encyclopedia; returns the articles that fit best.",
            tool_parameters(
                ["query"],
                query={"type": "string", "maxLength": 1_000},
                top_k={"type": "integer", "minimum": 1, "maximum": MOST_RESULTS, "default": 3},
            ),
            self._search,
        )

    def _search(self, query: str, top_k: int = 3) -> str:
        found = self.find(query, int(top_k))
        if not found:
            return "nothing was found"
        return "\n".join(
            f"Doc {number}(Title: {each.title}) {each.text}" for number, each in enumerate(found, 1)
        )

    def _score(self, number: int, words: Sequence[str]) -> float:
        counts, total = self._counts[number], len(self._documents)
        length = 1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * self._lengths[number] / self._mean_length
        score = 0.0
        for word in words:
            if (count := counts[word]) > 0:
                holding = self._holding[word]
                rarity = math.log(1 + (total - holding + 0.5) / (holding + 0.5))
                score += rarity * count * (_SATURATION + 1) / (count + _SATURATION * length)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
