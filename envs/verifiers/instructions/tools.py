"""The tools by name: our own rules of thumb, or the libraries that IFEval itself uses."""

from typing import Any, Literal

from rollgym.envs.verifiers.instructions.text import (
    BuiltinDetector,
    BuiltinTokenizer,
    LanguageDetector,
    TextTools,
    Tokenizer,
)
from rollgym.extras import install_line

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
        """Return what is likeliest; None where there is nothing to go by."""
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
