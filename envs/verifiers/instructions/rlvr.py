"""RLVR-IFEval's naming: one function name a row, with `N`, `quantifier`, `keyword_list` and the like.

Source: allenai/RLVR-IFeval and the functions of open-instruct and ROLL that go with it. Several decide otherwise than
IFEval's instruction of that kind (so many times means exactly that, words are split at spaces, dividers are `* * *`)
and are functions of their own; those that decide the same are IFEval's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rollgym.envs.verifiers.arguments import Quantifier, count, quantifier, text, texts
from rollgym.envs.verifiers.instructions import copies, formats, wording
from rollgym.envs.verifiers.instructions.table import Instruction
from rollgym.envs.verifiers.instructions.text import Text

_DIVIDER = "* * *"
_TOLERANCE = 0.1
_WORD = re.compile(r"\w+")


def _about(number: int, how: Quantifier, bound: int, tolerance: int) -> bool:
    if how == "at least":
        return number >= bound
    if how == "at most":
        return number <= bound
    return abs(number - bound) <= tolerance


def _tenth(bound: int) -> int:
    return max(round(bound * _TOLERANCE), 1)


def _keywords(text: Text, keyword_list: Sequence[str]) -> bool:
    return all(each.lower() in text.raw.lower() for each in keyword_list)


def _keyword_frequency(text: Text, word: str, N: int) -> bool:  # noqa: N803 - as the data set calls it
    return _WORD.findall(text.raw.lower()).count(word.lower()) == N


def _forbidden(text: Text, forbidden_words: Sequence[str]) -> bool:
    return not any(each.lower() in text.raw.lower() for each in forbidden_words)


def _letter_frequency(text: Text, letter: str, N: int) -> bool:  # noqa: N803
    return text.raw.count(letter) == N


def _paragraphs(text: Text, N: int) -> bool:  # noqa: N803
    parts = text.stripped.split(_DIVIDER)
    return len(parts) == N and all(part.strip() for part in parts)


def _words(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(text.pieces), quantifier, N, _tenth(N))


def _sentences(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(text.sentences), quantifier, N, 1)


def _first_word(text: Text, N: int, first_word: str, i: int) -> bool:  # noqa: N803
    parts = text.raw.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def _postscript(text: Text, postscript_marker: str) -> bool:
    _, marker, after = text.raw.partition(postscript_marker)
    return bool(marker and after.strip())


def _placeholders(text: Text, N: int) -> bool:  # noqa: N803
    return formats.placeholders(text, N)


def _bullets(text: Text, N: int) -> bool:  # noqa: N803
    return sum(line.strip().startswith(("*", "-")) for line in text.raw.split("\n")) == N


def _choice(text: Text, options: Sequence[str]) -> bool:
    return any(option in text.raw for option in options)


def _highlights(text: Text, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\*(.*?)\*", text.raw)) >= N


def _sections(text: Text, N: int, section_splitter: str) -> bool:  # noqa: N803
    return len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text.raw, re.IGNORECASE)) >= N


def _json(text: Text) -> bool:
    try:
        json.loads(text.raw)
    except (ValueError, RecursionError):
        return False
    return True


def _repeats(text: Text, original_prompt: str) -> bool:
    return text.raw.startswith(original_prompt)


def _two(text: Text) -> bool:
    return text.raw.count("******") == 1 and copies.two_responses(text)


def _uppercase(text: Text) -> bool:
    return text.raw == text.raw.upper()


def _lowercase(text: Text) -> bool:
    return text.raw == text.raw.lower()


def _capital_words(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(re.findall(r"\b[A-Z]+\b", text.raw)), quantifier, N, _tenth(N))


def _ends(text: Text, end_phrase: str) -> bool:
    return text.raw.endswith(end_phrase)


_NUMBER = {"N": count}
_QUANTITY = {"N": count, "quantifier": quantifier}

FUNCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        "verify_keywords": Instruction(_keywords, {"keyword_list": texts}),
        "verify_keyword_frequency": Instruction(_keyword_frequency, {"word": text, "N": count}),
        "validate_forbidden_words": Instruction(_forbidden, {"forbidden_words": texts}),
        "verify_letter_frequency": Instruction(_letter_frequency, {"letter": text, "N": count}),
        "validate_response_language": Instruction(wording.language, {"language": text}),
        "verify_paragraph_count": Instruction(_paragraphs, _NUMBER),
        "validate_word_constraint": Instruction(_words, _QUANTITY),
        "verify_sentence_constraint": Instruction(_sentences, _QUANTITY),
        "validate_paragraphs": Instruction(_first_word, {"N": count, "first_word": text, "i": count}),
        "verify_postscript": Instruction(_postscript, {"postscript_marker": text}),
        "validate_placeholders": Instruction(_placeholders, _NUMBER),
        "verify_bullet_points": Instruction(_bullets, _NUMBER),
        "validate_title": Instruction(formats.title),
        "validate_choice": Instruction(_choice, {"options": texts}),
        "validate_highlighted_sections": Instruction(_highlights, _NUMBER),
        "validate_sections": Instruction(_sections, {"N": count, "section_splitter": text}),
        "validate_json_format": Instruction(_json),
        "validate_repeat_prompt": Instruction(_repeats, {"original_prompt": text}),
        "validate_two_responses": Instruction(_two),
        "validate_uppercase": Instruction(_uppercase),
        "validate_lowercase": Instruction(_lowercase),
        "validate_frequency_capital_words": Instruction(_capital_words, _QUANTITY),
        "validate_end": Instruction(_ends, {"end_phrase": text}),
        "validate_quotation": Instruction(wording.quoted),
        "validate_no_commas": Instruction(wording.no_comma),
    }
)
"""The 25 functions by their names."""
