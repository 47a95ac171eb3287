"""A response as instructions look at it: its words, sentences, paragraphs and language, each found once.

They are found by rules of thumb, or by the libraries that IFEval itself uses (nltk, langdetect).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from rollgym.envs.verifiers.languages import guess_language
from rollgym.extras import install_line

_WORD = re.compile(r"\w+")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
# The end of a sentence: its marks, what closes with it, and then space or the end.
_SENTENCE_END = re.compile(r"(?<![.!?])([.!?]++)([\"'”’)\]]*+)(?=\s|\Z)")
_TITLES = "mr mrs ms dr prof sr jr st gen col capt lt rev hon"
_MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
_OTHERS = "vs etc e.g i.e cf al inc ltd co corp no fig vol pp p.s p.p.s u.s u.k a.m p.m approx dept est"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_MONTHS} {_OTHERS}".split())
_LAST_WORD = re.compile(r"[^\s\"'“‘(\[]+\Z")
_LONGEST_ABBREVIATION = 8
_BLANKS = re.compile(r"\s*+")
# Words as the Penn Treebank counts them: clitics by themselves, hyphenated words as one.
_TOKEN = re.compile(
    r"\w+(?=n't\b)|n't\b|'(?:s|m|d|ll|re|ve)\b|[\w*/\-_.&]*\w[\w*/\-_]*|[*/\-.&]++|\S", re.IGNORECASE
)


class Tokenizer(Protocol):
    """How texts are taken apart."""

    def sentences(self, text: str) -> list[str]:
        """Return the sentences of a text."""
        ...

    def tokens(self, text: str) -> list[str]:
        """Return words and punctuation, as a treebank does."""
        ...


class LanguageDetector(Protocol):
    """How the language of a text is found."""

    def language(self, text: str) -> str | None:
        """Return the code of a text's language, or None if it is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class TextTools:
    """What a rule of thumb or a library can be asked for.

    Attributes:
        tokenizer: For sentences and tokens.
        detector: For languages.
    """

    tokenizer: Tokenizer
    detector: LanguageDetector


class BuiltinTokenizer:
    """Rules of thumb, the same on every machine."""

    def sentences(self, text: str) -> list[str]:
        """Return what ends in `.`, `!` or `?` before a space; abbreviations and initials end nothing."""
        found, begin = [], 0
        for end in _SENTENCE_END.finditer(text):
            word = text[max(begin, end.start() - _LONGEST_ABBREVIATION) : end.start()]
            if end[1] == "." and _is_abbreviation(word) and end.end() < len(text):
                continue
            if end[1].startswith("..") and _continues(text, end.end()):
                continue
            found.append(text[begin : end.end()].strip())
            begin = end.end()
        found.append(text[begin:].strip())
        return [sentence for sentence in found if sentence]

    def tokens(self, text: str) -> list[str]:
        """Return words and punctuation."""
        return _TOKEN.findall(text)


class BuiltinDetector:
    """A guess by scripts and the commonest words, the same on every machine."""

    def language(self, text: str) -> str | None:
        """Return the guess."""
        return guess_language(text)


def _continues(text: str, position: int) -> bool:
    """Whether a sentence continues after blanks, in a small letter."""
    after = _BLANKS.match(text, position)
    assert after is not None
    return text[after.end() : after.end() + 1].islower()


def _is_abbreviation(before: str) -> bool:
    last = _LAST_WORD.search(before)
    if last is None:
        return False
    word = last[0]
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


class Text:
    """One response, or one loose variant of it.

    Args:
        raw: The text.
        tools: How sentences, tokens and the language are found.
    """

    def __init__(self, raw: str, tools: TextTools) -> None:
        self.raw = raw
        self._tools = tools

    @cached_property
    def stripped(self) -> str:
        """The text without space around it."""
        return self.raw.strip()

    @cached_property
    def words(self) -> list[str]:
        """Runs of letters, digits and underscores."""
        return _WORD.findall(self.raw)

    @cached_property
    def pieces(self) -> list[str]:
        """What stands between spaces."""
        return self.raw.split()

    @cached_property
    def sentences(self) -> list[str]:
        """Its sentences."""
        return self._tools.tokenizer.sentences(self.raw)

    @cached_property
    def tokens(self) -> list[str]:
        """Its words and punctuation, as a treebank counts them."""
        return self._tools.tokenizer.tokens(self.raw)

    @cached_property
    def language(self) -> str | None:
        """The code of its language, or None if it is unknown."""
        return self._tools.detector.language(self.raw)

    def part(self, raw: str) -> "Text":
        """Return a part of it that is looked at with the same tools."""
        return Text(raw, self._tools)


def divided(raw: str) -> list[str] | None:
    """Return the paragraphs between dividers `***`; None if one but the first or last is blank."""
    return _filled(_DIVIDER.split(raw))


def spaced(raw: str) -> list[str] | None:
    """Return the paragraphs between empty lines; None if one but the first or last is blank."""
    return _filled(raw.split("\n\n"))


def _filled(parts: list[str]) -> list[str] | None:
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return [part for part in parts if part.strip()]


TokenizerName = Literal["builtin", "nltk"]
DetectorName = Literal["builtin", "langdetect"]

_SEED = 0


def _needs_extra(error: ImportError) -> str:
    return f"needs the extra ifeval ({install_line('ifeval')}): {error}"


class NltkTokenizer:
    """nltk's English punkt model and treebank tokens.

    Raises:
        ValueError: It, or its model, is not installed.
    """

    def __init__(self) -> None:
        try:
            # An optional extra.
            import nltk
        except ImportError as error:
            raise ValueError(f"tokenizer 'nltk' {_needs_extra(error)}") from error
        try:
            nltk.data.find("tokenizers/punkt_tab/english")
        except LookupError as error:
            raise ValueError(
                "tokenizer 'nltk' needs a model, which is a download: python -m nltk.downloader punkt_tab"
            ) from error
        self._nltk: Any = nltk

    def sentences(self, text: str) -> list[str]:
        """Return punkt's sentences."""
        return list(self._nltk.tokenize.sent_tokenize(text))

    def tokens(self, text: str) -> list[str]:
        """Return the treebank's tokens."""
        return list(self._nltk.tokenize.word_tokenize(text))


class LangdetectDetector:
    """langdetect with a fixed seed: by itself it draws at random, and says now this and now that.

    Raises:
        ValueError: It is not installed.
    """

    def __init__(self) -> None:
        try:
            # An optional extra.
            from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
            from langdetect.lang_detect_exception import LangDetectException
        except ImportError as error:
            raise ValueError(f"language_detector 'langdetect' {_needs_extra(error)}") from error
        self._unknown = LangDetectException
        self._factory: Any = DetectorFactory()
        self._factory.load_profile(PROFILES_DIRECTORY)
        self._factory.seed = _SEED

    def language(self, text: str) -> str | None:
        """Return the likeliest language; None if the text gives no hint."""
        detector = self._factory.create()
        detector.append(text)
        try:
            return str(detector.detect())
        except self._unknown:
            return None


def text_tools(tokenizer: TokenizerName, language_detector: DetectorName) -> TextTools:
    """Return the tools of these names.

    Raises:
        ValueError: There are none of a name, or they are not installed.
    """
    return TextTools(_tokenizer(tokenizer), _detector(language_detector))


def _tokenizer(name: str) -> Tokenizer:
    if name == "builtin":
        return BuiltinTokenizer()
    if name == "nltk":
        return NltkTokenizer()
    raise ValueError(f"tokenizer must be 'builtin' or 'nltk', not {name!r}")


def _detector(name: str) -> LanguageDetector:
    if name == "builtin":
        return BuiltinDetector()
    if name == "langdetect":
        return LangdetectDetector()
    raise ValueError(f"language_detector must be 'builtin' or 'langdetect', not {name!r}")
