"""Instructions about words and letters that must, may or must not occur.

IFEval reads keywords as regular expressions, inside words too; so do these, within a time limit. A keyword that is no
regular expression is looked for as it is written.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from rollgym.envs.core import patterns
from rollgym.envs.verifiers.arguments import Relation, holds
from rollgym.envs.verifiers.instructions.text import Text

_LETTERS_OF_A_PALINDROME = 3


def _pattern(keyword: str) -> str:
    try:
        patterns.check_pattern(keyword)
    except ValueError:
        return re.escape(keyword)
    return keyword


def _times(text: Text, keyword: str) -> int:
    return patterns.occurrences(_pattern(keyword), text.raw, ignore_case=True)


def existence(text: Text, keywords: Sequence[str]) -> bool:
    """Each keyword occurs."""
    return all(patterns.searches(_pattern(each), text.raw, ignore_case=True) for each in keywords)


def frequency(text: Text, keyword: str, frequency: int, relation: Relation) -> bool:
    """A keyword occurs so often."""
    return holds(_times(text, keyword.strip()), relation, frequency)


def frequency_exactly(text: Text, keyword: str, frequency: int, relation: Relation | None = None) -> bool:
    """A keyword occurs exactly so often, unless another relation is said."""
    times = _times(text, keyword)
    return times == frequency if relation is None else holds(times, relation, frequency)


def once(text: Text, keyword: str) -> bool:
    """A keyword occurs once."""
    return _times(text, keyword) == 1


def once_and_twice(text: Text, keyword1: str, keyword2: str) -> bool:
    """One keyword occurs once, another one twice."""
    return _times(text, keyword1) == 1 and _times(text, keyword2) == 2


def forbidden_words(text: Text, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a whole word."""
    return not any(
        patterns.searches(rf"\b(?:{_pattern(each)})\b", text.raw, ignore_case=True)
        for each in forbidden_words
    )


def excluded_word(text: Text, keyword: str) -> bool:
    """The word does not occur as a whole word, whatever stands beside it."""
    return re.search(rf"(?<!\w){re.escape(keyword)}(?!\w)", text.raw, re.IGNORECASE) is None


def letter_frequency(text: Text, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """A character occurs so often, in either case. IFEval draws a letter where it is none; this counts it."""
    return holds(text.raw.lower().count(letter.lower()), let_relation, let_frequency)


def letters(text: Text, N: int, relation: Relation) -> bool:  # noqa: N803 - what the data sets call it
    """There are so many letters of the English alphabet."""
    return holds(len(re.findall(r"[a-zA-Z]", text.raw)), relation, N)


def lowercase_words(text: Text, N: int) -> bool:  # noqa: N803
    """There are at most so many words in lower case."""
    return len(re.findall(r"\b[a-z]+\b", text.raw)) <= N


def unique_words(text: Text) -> bool:
    """No word occurs twice."""
    return len(set(text.words)) == len(text.words)


def palindrome(text: Text) -> bool:
    """A word of three letters or more reads the same backwards."""
    return any(
        len(word) >= _LETTERS_OF_A_PALINDROME and word == word[::-1]
        for word in (each.lower() for each in text.words)
    )


def no_consecutive_letters(text: Text) -> bool:
    """No word begins with the letter of the alphabet that follows the first letter of the word before."""
    first = [piece[0].lower() for piece in text.pieces]
    return not any(
        len(left) == len(right) == 1 and ord(right) - ord(left) == 1 for left, right in pairwise(first)
    )
