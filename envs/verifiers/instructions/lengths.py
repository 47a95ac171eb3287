"""Instructions about how many words, sentences and paragraphs there are."""

from rollgym.envs.verifiers.arguments import Relation, holds
from rollgym.envs.verifiers.instructions.text import Text, divided, spaced

_TWO, _THREE = 2, 3
_ENDS_A_WORD = frozenset(".,?!'\"")


def sentences(text: Text, num_sentences: int, relation: Relation) -> bool:
    """There are so many sentences."""
    return holds(len(text.sentences), relation, num_sentences)


def words(text: Text, num_words: int, relation: Relation) -> bool:
    """There are so many words."""
    return holds(len(text.words), relation, num_words)


def paragraphs(text: Text, num_paragraphs: int) -> bool:
    """There are exactly so many paragraphs between dividers `***`."""
    parts = divided(text.raw)
    return parts is not None and len(parts) == num_paragraphs


def two_divided(text: Text) -> bool:
    """There are two paragraphs between dividers."""
    return paragraphs(text, _TWO)


def two_spaced(text: Text) -> bool:
    """There are two paragraphs between empty lines."""
    parts = spaced(text.raw)
    return parts is not None and len(parts) == _TWO


def first_word_of_paragraph(text: Text, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """There are so many paragraphs between empty lines, and the nth begins with a word.

    As in IFEval, blank paragraphs are not counted and yet have a place: the nth is looked up among all.
    """
    parts = text.raw.split("\n\n")
    filled = sum(1 for part in parts if part.strip())
    if filled != num_paragraphs or not 1 <= nth_paragraph <= filled:
        return False
    begin = parts[nth_paragraph - 1].split()
    if not begin:
        return False
    letters = begin[0].lstrip("'").lstrip('"')
    end = next((index for index, letter in enumerate(letters) if letter in _ENDS_A_WORD), len(letters))
    return letters[:end].lower() == first_word.strip().lower()


def composition(text: Text, n_sent: int, n_words: int) -> bool:
    """There are three paragraphs between dividers, of so many sentences, of so many words each."""
    parts = divided(text.raw.replace("* * *", "***"))
    if parts is None or len(parts) != _THREE:
        return False
    for part in map(text.part, parts):
        if len(part.sentences) != n_sent:
            return False
        if any(len(part.part(sentence).words) != n_words for sentence in part.sentences):
            return False
    return True
