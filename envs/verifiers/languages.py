"""Which script and language a text is in, as far as its letters and commonest words tell.

A guess without a model: scripts that one language has decide by themselves, others by letters or words that only one of
their languages has.
"""

from collections import Counter
from collections.abc import Mapping

import regex

# Of a text's words, one in so many has to be common in the language that it is said to be in.
_ONE_IN = 8

SCRIPTS: tuple[str, ...] = (
    *("Latin", "Cyrillic", "Greek", "Han", "Hiragana", "Katakana", "Hangul", "Arabic", "Hebrew", "Thai"),
    *("Devanagari", "Bengali", "Gurmukhi", "Gujarati", "Tamil", "Telugu", "Kannada", "Malayalam"),
)
"""Unicode's names of the scripts that are told apart."""

_SCRIPT = {name: regex.compile(rf"\p{{Script={name}}}") for name in SCRIPTS}
_LETTER = regex.compile(r"\p{L}")
_WORD = regex.compile(r"[\p{L}\p{M}']+")
_ALONE = {
    "Greek": "el",
    "Hiragana": "ja",
    "Katakana": "ja",
    "Hangul": "ko",
    "Hebrew": "he",
    "Thai": "th",
    "Bengali": "bn",
    "Gurmukhi": "pa",
    "Gujarati": "gu",
    "Tamil": "ta",
    "Telugu": "te",
    "Kannada": "kn",
    "Malayalam": "ml",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORDS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "Latin": {
        "en": _words("the and of to is that it with for was are this have be not you from"),
        "es": _words("el los las que y una es por con del para como más pero su está"),
        "pt": _words("os que um uma é e não no com do da em para mais como mas muito ao são você"),
        "fr": _words("le les des et est une que qui dans pour pas sur avec ce au vous"),
        "de": _words("der die und das ist nicht ein eine zu den mit sich auf für von dem"),
        "it": _words("il che di è e per non un una con gli sono della nel più anche questo"),
        "nl": _words("het een en van is niet dat op te zijn met voor de ook maar wordt"),
        "pl": _words("w nie się na jest i że z do to jak ale są przez tym może"),
        "fi": _words("ja on ei se että hän oli ovat mutta kuin myös tämä joka mukaan sekä kun"),
        "vi": _words("và của là có không một cho được trong người các với những này để đã"),
        "sw": _words("na ni ya wa kwa katika za la sana hii kuwa cha yake hiyo pia lakini kama"),
        "sv": _words("och att det som en är på för av med inte den till har jag om"),
    },
    "Devanagari": {
        "hi": _words("है हैं में के की का और से को पर यह नहीं था एक भी"),
        "mr": _words("आहे आणि आहेत च्या मध्ये हे ते या नाही होते एक साठी करण्यासाठी असे होता"),
        "ne": _words("छ र हो मा को लागि पनि गर्न छन् यो थियो भएको हुन्छ एक तर"),
    },
}
_MARKS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Arabic": (("ur", "ٹڈڑےںھہ"), ("fa", "پچژگکی"), ("ar", "")),
    "Cyrillic": (("uk", "іїєґ"), ("ru", "ыэё"), ("bg", "")),
}


def script_shares(text: str) -> dict[str, float]:
    """Return the share of each script in a text's letters; nothing if it has none."""
    letters = _LETTER.findall(text)
    if not letters:
        return {}
    joined = "".join(letters)
    counts = {name: len(pattern.findall(joined)) for name, pattern in _SCRIPT.items()}
    return {name: count / len(letters) for name, count in counts.items() if count}


def letters_in(text: str) -> int:
    """Return how many letters a text has."""
    return len(_LETTER.findall(text))


def guess_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the language that a text seems to be in; None where nothing tells."""
    shares = script_shares(text)
    if not shares:
        return None
    # Japanese mixes its syllables with Han characters, which Chinese has alone.
    kana = shares.get("Hiragana", 0.0) + shares.get("Katakana", 0.0)
    if kana >= 0.1:
        return "ja"
    script = max(shares, key=lambda name: shares[name])
    if script == "Han":
        return "zh"
    if script in _ALONE:
        return _ALONE[script]
    if script in _MARKS:
        return next(
            language for language, marks in _MARKS[script] if not marks or set(marks) & set(text.lower())
        )
    return _by_words(text, _WORDS[script])


def _by_words(text: str, languages: Mapping[str, frozenset[str]]) -> str | None:
    words = Counter(_WORD.findall(text.lower()))
    found = {
        language: sum(count for word, count in words.items() if word in common)
        for language, common in languages.items()
    }
    (best, most), (_, next_most) = sorted(found.items(), key=lambda pair: -pair[1])[:2]
    return best if most > next_most and most * _ONE_IN >= words.total() else None
