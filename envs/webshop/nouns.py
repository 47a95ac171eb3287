"""Nouns of a title: what kind of thing it is."""

import re
from functools import lru_cache
from typing import Any

from rollgym.envs.webshop.reward import NounExtractor

_WORD = re.compile(r"[A-Za-z]{2,}")
_MODEL = "en_core_web_sm"

# What titles of shops have beside nouns and what the endings below do not tell.
_NO_NOUN_LIST = """
a an the of for with and or in on to by from at is are it its this that your our my you up as not no non all
any new best good great big small large mini extra super ultra pro premium classic everyday deluxe modern
vintage long short high low wide slim thin thick heavy light soft hard dry wet hot cold warm cool fast slow
full free easy safe natural organic fresh pure raw rich real black white red blue green yellow pink purple
grey gray brown old young men women adult cute nice fine double single dual portable wireless adjustable use
clean carry apply find me looking want need
"""
_NO_NOUNS = frozenset(_NO_NOUN_LIST.split())
_NO_NOUN = re.compile(r"(?:able|ible|ful|less|ous|ive|proof|resistant|friendly|tested|ish|ly|ed|ing)$")


def noun_extractor(tagger: str) -> NounExtractor:
    """Return an extractor by its name.

    Raises:
        ValueError: The name is unknown, or its dependencies are not installed.
    """
    if tagger == "heuristic":
        return heuristic_nouns
    if tagger == "spacy":
        return spacy_nouns()
    raise ValueError(f"noun_tagger must be 'heuristic' or 'spacy', not {tagger!r}")


def heuristic_nouns(title: str) -> list[str]:
    """Return the words that are neither known for something else nor end like it."""
    words = (word.lower() for word in _WORD.findall(title))
    return [word for word in words if word not in _NO_NOUNS and not _NO_NOUN.search(word)]


@lru_cache(maxsize=1)
def spacy_nouns() -> NounExtractor:
    """Return the extractor that WebShop uses, spaCy's small English model.

    Raises:
        ValueError: The model is not installed.
    """
    try:
        import spacy

        model: Any = spacy.load(_MODEL)
    except (ImportError, OSError) as error:
        raise ValueError(
            f"noun_tagger 'spacy' needs spaCy and its model {_MODEL} ({error}); install them, or use 'heuristic'"
        ) from error

    @lru_cache(maxsize=65536)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
