"""Words as a search engine for English reads them: Lucene's English analysis."""

import re
from functools import lru_cache

import snowballstemmer

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
