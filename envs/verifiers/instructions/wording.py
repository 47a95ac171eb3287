"""Instructions about how a response begins and ends, its case, its punctuation and its language."""

import re

from rollgym.envs.verifiers.arguments import Relation, holds
from rollgym.envs.verifiers.instructions.text import Text
from rollgym.envs.verifiers.languages import letters_in

_NO_WORD = re.compile(r"[^\w\s]")


def ends_with(text: Text, end_phrase: str) -> bool:
    """It ends with a phrase, quotation marks aside."""
    return text.stripped.strip('"').lower().endswith(end_phrase.strip().lower())


def quoted(text: Text) -> bool:
    """It stands in double quotation marks."""
    return len(text.stripped) > 1 and text.stripped[0] == text.stripped[-1] == '"'


def capital_words(text: Text, capital_frequency: int, capital_relation: Relation) -> bool:
    """So many words are in capital letters."""
    return holds(sum(map(str.isupper, text.tokens)), capital_relation, capital_frequency)


def _english(text: Text) -> bool:
    return text.language in (None, "en")


def english_capital(text: Text) -> bool:
    """It is in English, in capital letters only."""
    return text.raw.isupper() and _english(text)


def english_lowercase(text: Text) -> bool:
    """It is in English, in lower case only."""
    return text.raw.islower() and _english(text)


def language(text: Text, language: str) -> bool:
    """All of it is in a language. What has no letters passes, as in IFEval."""
    return text.language == language or not letters_in(text.raw)


def no_comma(text: Text) -> bool:
    """There is no comma."""
    return "," not in text.raw


def no_dot(text: Text) -> bool:
    """There is no dot."""
    return "." not in text.raw


def no_exclamation_mark(text: Text) -> bool:
    """There is no exclamation mark."""
    return "!" not in text.raw


def _bare(word: str) -> str:
    return _NO_WORD.sub("", word).lower()


def first_word(text: Text, first_word: str) -> bool:
    """It begins with a word."""
    return bool(text.pieces) and text.pieces[0].lower() == first_word.lower()


def last_word(text: Text, last_word: str) -> bool:
    """Its last word, punctuation aside, is this one."""
    return bool(text.pieces) and _bare(text.pieces[-1]) == last_word.lower()


def first_word_of_sentences(text: Text, first_word: str) -> bool:
    """Every sentence begins with a word."""
    return all(sentence.split()[0].lower() == first_word.lower() for sentence in text.sentences)


def last_word_of_sentences(text: Text, last_word: str) -> bool:
    """Every sentence ends with a word, punctuation aside."""
    return all(_bare(sentence.split()[-1]) == last_word.lower() for sentence in text.sentences)


def word_at(text: Text, keyword: str, n: int, m: int) -> bool:
    """The nth sentence has a word as its mth one."""
    if not 1 <= n <= len(text.sentences):
        return False
    words = text.part(text.sentences[n - 1]).words
    return 1 <= m <= len(words) and words[m - 1] == keyword


def same_start_and_end(text: Text) -> bool:
    """It begins and ends with the same word, and nothing stands after that."""
    tokens = text.words
    if len(tokens) < 2 or not text.stripped.endswith(tokens[-1]):
        return False
    return tokens[0].lower() == tokens[-1].lower()
