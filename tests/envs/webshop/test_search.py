"""The search engine of WebShop-v0: how it reads words, how it scores, and what comes first."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.webshop import search
from rollgym.envs.webshop.search import Facets, IndexWriter, SearchIndex, words_of, write_facets


def build(folder: Path, texts: list[str]) -> SearchIndex:
    writer = IndexWriter()
    for text in texts:
        writer.add(text)
    writer.write(folder)
    return SearchIndex(folder, len(texts))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The quick browns are not for Lazy dogs", ["quick", "brown", "lazi", "dog"]),
        ("women's 3.5mm cables, 1,099.00 usb-c", ["women", "3.5mm", "cabl", "1,099.00", "usb", "c"]),
        ("relational conditioning hopping ponies", ["relat", "condit", "hop", "poni"]),
        ("Café №5 naïve", ["café", "5", "naïv"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


WORDS = st.sampled_from(["red", "wool", "scarf", "boots", "soft", "lamp", "x1"])


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(WORDS, max_size=12).map(" ".join), min_size=1, max_size=12),
    query=st.lists(WORDS, max_size=5).map(" ".join),
    limit=st.integers(1, 6),
)
def test_scores_are_those_of_the_formula(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], query: str, limit: int
) -> None:
    index = build(tmp_path_factory.mktemp("index"), documents)
    counts = [Counter(words_of(text)) for text in documents]
    average = max(1.0, sum(map(Counter.total, counts)) / len(counts))
    totals = []
    for count in counts:
        norm = 0.9 * (1 - 0.4 + 0.4 * count.total() / average)
        total = 0.0
        for word in words_of(query):
            frequency = sum(word in each for each in counts)
            idf = math.log(1 + (len(counts) - frequency + 0.5) / (frequency + 0.5))
            total += idf * count[word] / (count[word] + norm)
        totals.append(total)
    found = index.search(query, limit)
    assert len(found) == min(limit, sum(total > 0 for total in totals))
    best = sorted((total for total in totals if total > 0), reverse=True)[:limit]
    assert [totals[document] for document in found] == pytest.approx(best, rel=1e-5)


def test_of_equally_good_ones_the_earlier_comes_first(tmp_path: Path) -> None:
    index = build(tmp_path, ["blue lamp", "red lamp", "red lamp", "red lamp", "red red lamp"])
    assert index.search("red lamp", 3) == [4, 1, 2]
    assert index.search("unheard of", 3) == []
    assert index.search("the and of", 3) == []


def test_lengths_are_kept_as_lucene_keeps_them() -> None:
    lengths = np.asarray([0, 1, 23, 24, 39, 40, 41, 42, 55, 56, 59, 60, 1000], dtype=np.int32)
    kept = search._kept_length(lengths).tolist()
    assert kept == [0, 1, 23, 24, 39, 40, 40, 42, 54, 56, 56, 60, 984]


def test_an_index_does_not_depend_on_how_much_is_held_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"lamp{number % 7} red scarf {'soft ' * (number % 5)}" for number in range(50)]
    (tmp_path / "whole").mkdir()
    build(tmp_path / "whole", texts)
    monkeypatch.setattr(search, "_CHUNK_TOKENS", 16)
    (tmp_path / "parts").mkdir()
    build(tmp_path / "parts", texts)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name


def test_facets(tmp_path: Path) -> None:
    write_facets(tmp_path, [["c toys", "a soft"], ["c toys", "c toys"], [], ["a soft"]])
    facets = Facets(tmp_path)
    assert (facets.find("c toys"), facets.find("a soft"), facets.find("a hard")) == ([0, 1], [0, 3], [])
