"""All instructions by their names: IFEval's 25, and the 29 that open-instruct added (IFEvalG).

Sources: Zhou et al. 2023 (IFEval, arXiv:2311.07911), google-research/instruction_following_eval, and
allenai/open-instruct's IFEvalG; written afresh from what they decide.

IFEval reads keywords as regular expressions, inside words too; so do these, within a time limit. A keyword that is not
a regular expression is searched for as it is written. None looks at a place more than a few times: a response of
nothing but brackets or line breaks takes no longer than others.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from rollgym.envs.core import patterns
from rollgym.envs.verifiers.arguments import Reader, Relation, count, holds, relation, text, texts, word
from rollgym.envs.verifiers.instructions.text import Text, divided, spaced
from rollgym.envs.verifiers.languages import letters_in

_SEPARATOR = "******"


def _same(left: str, right: str) -> bool:
    return left.strip().lower() == right.strip().lower()


def two_responses(text: Text) -> bool:
    """There are two different responses with six asterisks between them."""
    parts = text.raw.split(_SEPARATOR)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    filled = [part.strip() for part in parts if part.strip()]
    return len(filled) == 2 and filled[0] != filled[1]


def repeats_prompt(text: Text, prompt_to_repeat: str) -> bool:
    """It begins with the prompt."""
    return text.stripped.lower().startswith(prompt_to_repeat.strip().lower())


def copies(text: Text, prompt_to_repeat: str) -> bool:
    """It is the prompt, and nothing else."""
    return _same(text.raw, prompt_to_repeat)


def copies_several_times(text: Text, prompt_to_repeat: str, N: int) -> bool:  # noqa: N803 - as data sets call it
    """It is the prompt several times, with six asterisks between."""
    parts = text.raw.split(_SEPARATOR)
    return len(parts) == N and all(_same(part, prompt_to_repeat) for part in parts)


def copies_span(text: Text, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """It is what lies between two places of the prompt.

    The instruction includes the last character and the checker of IFEvalG leaves it out; either is right here.
    """
    return any(_same(text.raw, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


def varies_phrase(text: Text, phrase: str, small_n: int) -> bool:
    """A phrase is said so many times, each time with one word in its middle replaced."""
    wanted = phrase.split()
    found = _begun_and_ended(text.pieces, wanted)
    return len(found) == small_n and all(
        len(each) == len(wanted) and sum(said != asked for said, asked in zip(each, wanted, strict=True)) == 1
        for each in found
    )


def _begun_and_ended(pieces: list[str], phrase: list[str]) -> list[list[str]]:
    """Return what begins with the first word of a phrase and ends with the next one that begins with its last."""
    found, index = [], 0
    while index < len(pieces):
        if pieces[index].endswith(phrase[0]):
            rest = range(index + 1, len(pieces))
            end = next((each for each in rest if pieces[each].startswith(phrase[-1])), None)
            if end is None:
                break
            found.append([phrase[0], *pieces[index + 1 : end], phrase[-1]])
            index = end
        index += 1
    return found


CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_STAR_BULLET = re.compile(r"^[^\S\n]*+\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*+-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_STRONG = re.compile(r"\*\*[^\n*]*\*\*")
_FENCE_OPENINGS = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def placeholders(text: Text, num_placeholders: int) -> bool:
    """There are at least so many placeholders such as `[address]`."""
    return sum(map(_bracketed, text.raw.split("\n"))) >= num_placeholders


def postscript(text: Text, postscript_marker: str) -> bool:
    """There is a postscript."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.raw.lower()) is not None


def bullets(text: Text, num_bullets: int) -> bool:
    """There are exactly so many bullet points, of `*` or `-`."""
    return len(_STAR_BULLET.findall(text.raw)) + len(_DASH_BULLET.findall(text.raw)) == num_bullets


def constrained_response(text: Text) -> bool:
    """It has one of the three answers."""
    return any(choice in text.raw for choice in CHOICES)


def highlights(text: Text, num_highlights: int) -> bool:
    """At least so many sections are highlighted, by one asterisk or two."""
    single = sum(1 for found in _HIGHLIGHT.findall(text.raw) if found.strip("*").strip())
    double = sum(
        1 for found in _STRONG.findall(text.raw) if found.removeprefix("**").removesuffix("**").strip()
    )
    return single + double >= num_highlights


def sections(text: Text, section_spliter: str, num_sections: int) -> bool:
    """There are at least so many sections, each begun by the splitter and a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text.raw)) >= num_sections


def is_json(text: Text) -> bool:
    """All of it is JSON, fenced or not."""
    content = text.stripped
    for opening in _FENCE_OPENINGS:
        content = content.removeprefix(opening)
    try:
        json.loads(content.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: Text) -> bool:
    """There is a title such as `<<poem of joy>>`."""
    return any(map(_has_title, text.raw.split("\n")))


def hyphenated_sentences(text: Text) -> bool:
    """The sentences are connected by hyphens, with no spaces around them."""
    pieces = text.raw.split("-")
    return pieces == text.part(text.raw.replace("-", " ")).sentences


def square_brackets(text: Text) -> bool:
    """Every word stands in square brackets."""
    return all(piece.startswith("[") and piece.endswith("]") for piece in text.pieces)


def wrapped_bigrams(text: Text) -> bool:
    """Every pair of words stands in double angular brackets."""
    pairs = zip(text.pieces[::2], text.pieces[1::2], strict=False)
    return all(left.startswith("<<") and right.endswith(">>") for left, right in pairs)


def _bracketed(line: str) -> int:
    """Count what stands between a bracket and the next one that closes."""
    count, begin = 0, line.find("[")
    while begin >= 0 and (end := line.find("]", begin)) >= 0:
        count += 1
        begin = line.find("[", end)
    return count


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return 0 <= begin < end - 2 and bool(line[begin:end].lstrip("<").rstrip(">").strip())


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
    """A character occurs so often, in either case. IFEval draws a letter for other characters; this counts them."""
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


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction that can be checked.

    Attributes:
        follows: Whether a text follows it, given its arguments.
        arguments: How each argument is read.
        optional: Arguments that need not be said.
    """

    follows: Callable[..., bool]
    arguments: Mapping[str, Reader] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


_IFEVAL = {
    "keywords:existence": Instruction(existence, {"keywords": texts}),
    "keywords:frequency": Instruction(frequency, {"keyword": text, "frequency": count, "relation": relation}),
    "keywords:forbidden_words": Instruction(forbidden_words, {"forbidden_words": texts}),
    "keywords:letter_frequency": Instruction(
        letter_frequency, {"letter": text, "let_frequency": count, "let_relation": relation}
    ),
    "language:response_language": Instruction(language, {"language": text}),
    "length_constraints:number_sentences": Instruction(
        sentences, {"num_sentences": count, "relation": relation}
    ),
    "length_constraints:number_paragraphs": Instruction(paragraphs, {"num_paragraphs": count}),
    "length_constraints:number_words": Instruction(words, {"num_words": count, "relation": relation}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        first_word_of_paragraph, {"num_paragraphs": count, "nth_paragraph": count, "first_word": text}
    ),
    "detectable_content:number_placeholders": Instruction(placeholders, {"num_placeholders": count}),
    "detectable_content:postscript": Instruction(postscript, {"postscript_marker": text}),
    "detectable_format:number_bullet_lists": Instruction(bullets, {"num_bullets": count}),
    "detectable_format:constrained_response": Instruction(constrained_response),
    "detectable_format:number_highlighted_sections": Instruction(highlights, {"num_highlights": count}),
    "detectable_format:multiple_sections": Instruction(
        sections, {"section_spliter": text, "num_sections": count}
    ),
    "detectable_format:json_format": Instruction(is_json),
    "detectable_format:title": Instruction(title),
    "combination:two_responses": Instruction(two_responses),
    "combination:repeat_prompt": Instruction(repeats_prompt, {"prompt_to_repeat": text}),
    "startend:end_checker": Instruction(ends_with, {"end_phrase": text}),
    "startend:quotation": Instruction(quoted),
    "change_case:capital_word_frequency": Instruction(
        capital_words, {"capital_frequency": count, "capital_relation": relation}
    ),
    "change_case:english_capital": Instruction(english_capital),
    "change_case:english_lowercase": Instruction(english_lowercase),
    "punctuation:no_comma": Instruction(no_comma),
}

_EXTENSION = {
    "copy:repeat_phrase": Instruction(varies_phrase, {"phrase": text, "small_n": count}),
    "copy:copy": Instruction(copies, {"prompt_to_repeat": text}),
    "copy:copying_simple": Instruction(copies, {"prompt_to_repeat": text}),
    "copy:copying_multiple": Instruction(copies_several_times, {"prompt_to_repeat": text, "N": count}),
    "new:copy_span_idx": Instruction(
        copies_span, {"prompt_to_repeat": text, "n_start": count, "n_end": count}
    ),
    "detectable_format:sentence_hyphens": Instruction(hyphenated_sentences),
    "detectable_format:square_brackets": Instruction(square_brackets),
    "detectable_format:bigram_wrapping": Instruction(wrapped_bigrams),
    "keywords:no_adjacent_consecutive": Instruction(no_consecutive_letters),
    "keywords:word_once": Instruction(once, {"keyword": word}),
    "keywords:word_count_different_numbers": Instruction(
        frequency_exactly,
        {"keyword": word, "frequency": count, "relation": relation},
        optional=frozenset({"relation"}),
    ),
    "keywords:exclude_word_harder": Instruction(excluded_word, {"keyword": word}),
    "keywords:palindrome": Instruction(palindrome),
    "keywords:keyword_specific_position": Instruction(word_at, {"keyword": word, "n": count, "m": count}),
    "keywords:start_end": Instruction(same_start_and_end),
    "paragraphs:paragraphs": Instruction(two_divided),
    "paragraphs:paragraphs2": Instruction(two_spaced),
    "first_word:first_word_sent": Instruction(first_word_of_sentences, {"first_word": word}),
    "first_word:first_word_answer": Instruction(first_word, {"first_word": word}),
    "last_word:last_word_sent": Instruction(last_word_of_sentences, {"last_word": word}),
    "last_word:last_word_answer": Instruction(last_word, {"last_word": word}),
    "punctuation:punctuation_dot": Instruction(no_dot),
    "punctuation:punctuation_exclamation": Instruction(no_exclamation_mark),
    "count:lowercase_counting": Instruction(lowercase_words, {"N": count}),
    "count:counting_composition": Instruction(composition, {"n_sent": count, "n_words": count}),
    "count:count_unique": Instruction(unique_words),
    "count:count_increment_word": Instruction(once_and_twice, {"keyword1": word, "keyword2": word}),
    "letters:letter_counting": Instruction(letters, {"N": count, "relation": relation}),
    "letters:letter_counting2": Instruction(
        letter_frequency, {"letter": text, "let_frequency": count, "let_relation": relation}
    ),
}

INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(_IFEVAL | _EXTENSION)
"""All that are named as IFEval names them."""
