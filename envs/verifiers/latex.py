"""Plain forms of what stands in mathematical answers: spacing, units, signs and words that mean nothing taken away."""

import re
from dataclasses import dataclass
from unicodedata import normalize

from rollgym.envs.verifiers.units import ABBREVIATIONS

_BLANKS = re.compile(r"\s{2,}")
_SPACES = re.compile(
    r"\\(?:[,;:! ]|quad\b|qquad\b|thinspace\b|left(?![a-z])|right(?![a-z])|displaystyle\b|limits\b)|~"
)
_THOUSANDS = re.compile(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\\!|\\,)\s*(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?![\d])")
_PERCENT = re.compile(
    r"\s*(?:\\?%|\\?\bpercent(?:age)?\b(?: points?)?|\bpct\b|\\text\{\s*(?:percent(?:age\s+points?)?|\\?%)\s*\})\s*$",
    re.IGNORECASE,
)
_CURRENCY = re.compile(
    r"^([-+−]?)\s*(?:\\?\$|\\text\s*\{\s*\\?\$\s*\}|€|£|¥|\\pounds|USD|EUR)\s*|\s*(?:\\?\$|€|£|¥|¢|USD|EUR)$"
)
_DEGREES = re.compile(
    r"\s*(?:\^\{?\s*\\circ\s*\}?|\\degree|°|\\?\bdegrees?\b)\s*(?:(?:[CF]|Celsius|Fahrenheit)\s*)?$"
)
# No unit begins with a number or a formula: "5 \text{6}" is not 5.
_UNIT_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*\{(?!\s*(?:[-+]?\d|\\[a-z]))[^{}]*\}"
    r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?\.?\s*$"
    r"|\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{[^{}]*\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*\}\s*$"
)
# Upright, it is not a unit of measurement.
_IMAGINARY_UNIT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*i\s*\}")
_SPACE_AT_END = re.compile(r"(?:\s|~|\\[,;:! ]|\\quad){1,8}$")
UNITS = "|".join(
    [*ABBREVIATIONS, "mph", "kph", "kmh", "[kMGT]?[bB]ps", "[µμ][mslLgAVFWJ]", "rads?", "deg", "sq", "cu"]
)
"""Units that may stand right beside a number."""
# Beside a number, letters can be variables: a unit is one that is known, or a word of its own with a vowel in it.
_WORDS_AFTER = re.compile(
    r"(?<=[\d})])(?:\s*(?:" + UNITS + r")\b|\s+(?=[a-zA-Z]*[aeiouy])[a-zA-Z]{3,}\b)"
    r"[a-zA-Z ./]*(?:[²³]|\^\{?[23]\}?)?\s*$"
    r"|(?<=[\d})])\s(?:km|m|cm|mm|ft|mi|g|kg|mg|L)/(?:s|h|hr|min|sec|m|cm|L|kg)(?:[²³]|\^\{?[23]\}?)?\s*$"
    r"|(?<=[\d})])\s*[a-zA-Z]{1,2}[²³]\s*$|(?<=[\d})])\s(?:[kcmd]?m|ft|in|yd|mi)[23]\s*$"
    r"|(?<=\d)\s(?:AM|PM)\s*$|(?<=\d)\s?[ap]\.\s?m\s*$"
    r"|(?<=[\d})])\s?/\s?(?:min(?:ute)?|hour|hr|day|week|month|year|person)\s*$"
)
# "12^{\\text{th}}", "3^{rd}" and "21st".
_ORDINAL = re.compile(
    r"(?<=\d)(?:\s*\^\s*)?(?:\{\s*)?(?:\\(?:text|mathrm|textrm|mbox|textsuperscript)\s*\{\s*)?(?:st|nd|rd|th)[\s}]*$"
)
_NOUNITS = re.compile(
    r"\b(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|or|and|to|inf|infty|infinity|if|for|choose)\b",
    re.IGNORECASE,
)
_WRAPPED_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname|mathit)\s*\{([^{}]*)\}"
)
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALE = re.compile(
    r"(?<=[\d})])\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*)?(" + "|".join(_SCALES) + r")s?\b", re.IGNORECASE
)
_NAMED = re.compile(
    r"^\s*\\?[a-zA-Z](?:_\{?\w{1,3}\}?)?(?:\([a-zA-Z]\))?'?\s*(?:=|:=|\\approx|\\in(?![a-z]))\s*(?=\S)"
)
_FRACTIONS = {sign: normalize("NFKC", sign).split("⁄") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_MINUS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–—﹣", "-"),
        # Of full width, as Chinese and Japanese texts have them.
        **{chr(0xFF01 + index): chr(0x21 + index) for index in range(94)},
        "\u3000": " ",
        "\u00a0": " ",
        "\u202f": " ",
        "×": "*",
        "·": "*",
        "÷": "/",
        "⁄": "/",
        # Marks of a width of nothing, which are copied with what they stand beside.
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f\ufe0e\ufe0f\u20e3"),
        **dict.fromkeys(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))),
        **dict.fromkeys("’‘ʼ", "'"),
        **dict.fromkeys("“”„", '"'),
        **{sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, (top, bottom) in _FRACTIONS.items()},
    }
)
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_POWER = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_ROOT = re.compile(r"√\s*(\d+|[a-zA-Z])")
# Signs that LaTeX writes with commands.
_SIGNS = str.maketrans(
    {
        "∞": r"\infty ",
        "∅": r"\emptyset ",
        "≠": r"\neq ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "ℝ": r"\mathbb{R}",
    }
)
# Variables and choices, which are not words.
_LETTER_LIST = re.compile(r"-?\s?[a-zA-Z](?:\s?,\s?-?\s?[a-zA-Z])+")
_SHORTEST_NAME = 2
_LONGEST_PRODUCT_OF_SMALL = 2
# Capitals are names of points, outcomes and days, and their order counts; so it does in words. Products of variables
# are small letters: any two of them, or the first or the last of the alphabet.
_CAPITAL = re.compile(r"[A-Z]")
_SMALL = re.compile(r"[a-z]")
_CAPITALIZED = re.compile(r"[A-Z][a-z]+")
_VARIABLES = (frozenset("abc"), frozenset("xyz"))
SHORT_WORDS = frozenset(
    {
        *("no", "up", "in", "on", "at", "go", "yes", "odd", "all", "any"),
        *("one", "two", "six", "ten", "red", "day", "row"),
    }
)
"""Words of up to three letters, which are no products of variables."""
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s'’.,-]+[^\W\d_]+)*[.!]?")


# One letter or digit needs no braces.
_BRACED = re.compile(r"([_^])\s*\{\s*(\w)\s*\}")
_LEAD_IN = re.compile(
    r"\s*(?:thus|so|hence|therefore|then|finally|consequently|accordingly|clearly|now)"
    r"(?:\s*,\s*|:?\s+(?=[$\\\d(-]))",
    re.IGNORECASE,
)
_ABOUT = re.compile(r"^\s*(?:\\approx(?![a-z])|≈)\s*(?=[-\d.\\$])")
_LABEL = re.compile(r"\s*[a-zA-Z][a-zA-Z ]{1,30}:\s*(?=[$\\\d(-])")
# Points that belong to a number.
_GOES_ON = re.compile(r"\.\d{3,60}\.\.\.$")
_LONGEST_GOING_ON = 64


@dataclass(frozen=True, slots=True)
class Plain:
    """An answer in its plain form.

    Attributes:
        text: Without units, currency, degrees, a name before an equals sign, and marks of spacing.
        percent: Whether it was said in per cent.
        scale: What the number is counted in: a million for `5 million`.
        unit: The units, currency and degrees that were taken away, as they were written.
    """

    text: str
    percent: bool = False
    scale: int = 1
    unit: str = ""


def plain(answer: str) -> Plain:
    """Return the plain form of an answer."""
    # One blank means what many mean, and searches for what ends in blanks would look at each of them again.
    text = _trimmed(_BLANKS.sub(" ", _angles(_IMAGINARY_UNIT.sub("i", undressed(in_one_form(answer))))))
    percent = False
    scale = _SCALE.search(text) if "llion" in text or "nd" in text or "zen" in text else None
    removed: list[str] = []
    # Units and signs stand around each other: "$5.00 dollars", "28\\% \\text{ of them}".
    for _ in range(3):
        before = text
        match = _PERCENT.search(text) if "%" in text or "p" in text.lower() else None
        if match is not None and match.start() > 0:
            percent, text = True, text[: match.start()].rstrip()
        text = _without_units(text, removed)
        text = _trimmed(text)
        if text == before:
            break
    text = _spaced(text)
    # Units are taken away from the end on.
    unit = " ".join(reversed(removed))
    return Plain(text, percent, 1 if scale is None else _SCALES[scale[1].lower()], unit)


def typeset(text: str) -> str:
    """Return a text with the signs that have a command in LaTeX written as that command."""
    text = _IMAGINARY_UNIT.sub("i", text) if "i" in text else text
    text = _angles(undressed(text))
    if text.isascii():
        return text
    text = _POWER.sub(lambda match: f"^{{{match[0].translate(_POWERS)}}}", in_one_form(text))
    return _ROOT.sub(r"\\sqrt{\1}", text).translate(_SIGNS)


_COLOR = r"\\(?:text)?color\s*\{[\w!.]{1,30}\}"
_SIZE = (
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|bf|it|rm|bfseries|itshape)(?![a-zA-Z])"
)
_DRESSED = re.compile(
    rf"\{{\s*(?:{_COLOR}|{_SIZE})\s*([^{{}}\\]{{0,200}})\}}"
    rf"|(?:{_COLOR}|\\(?:underline|uline|bm|boldsymbol|mathsf|mathtt|texttt|emph)(?![a-zA-Z]))\s*"
    r"\{((?:[^{}]|\{[^{}]{0,200}\}){0,200})\}"
)
_SWITCH = re.compile(rf"(?:{_COLOR}|{_SIZE})\s*")


def undressed(text: str) -> str:
    """Return a text without the colours, sizes and lines of LaTeX, which say nothing of a value."""
    if "\\" not in text:
        return text
    text = _DRESSED.sub(lambda match: match[1] if match[1] is not None else match[2], text)
    return _SWITCH.sub("", text)


def in_one_form(text: str) -> str:
    """Return a text with letters and signs that can be written in several ways written in one."""
    return text if text.isascii() else normalize("NFC", text).translate(_MINUS)


def _angles(text: str) -> str:
    """Return a text with the angles around a vector written as brackets."""
    return text.replace("\\langle", "(").replace("\\rangle", ")") if "angle" in text else text


def without_lead_in(text: str, *, labels: bool = False) -> str:
    """Return a text without what leads to an answer, and without the point at its end.

    Args:
        text: Such as "So, 2." or "Thus, $n=2$."
        labels: Whether a label leads to an answer, too, as in "Total: 18".
    """
    match = _LEAD_IN.match(text) or (_LABEL.match(text) if labels else None)
    return text if match is None else text[match.end() :].rstrip(" \t\n.;")


def _trimmed(text: str) -> str:
    text = text.strip().strip("*_`").strip()
    end = len(text)
    while end > 1 and text[end - 1] in ".,;:" and not _goes_on(text, end):
        end -= 1
        while end and text[end - 1].isspace():
            end -= 1
    text = text[:end]
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    return text


def _goes_on(text: str, end: int) -> bool:
    """Whether the points before a place belong to a number, such as `0.333...`."""
    if text[end - 4 : end - 3].isdigit() and text.startswith("...", end - 3):
        return _GOES_ON.search(text, max(0, end - _LONGEST_GOING_ON), end) is not None
    return False


def _without_units(text: str, removed: list[str]) -> str:
    """Return a text without its units, which are appended to those that are removed."""
    if text.isdigit():
        return text
    # Each search costs more than a look at whether there can be anything to find.
    if "=" in text or "\\" in text or "≈" in text:
        text = _ABOUT.sub("", _NAMED.sub("", text, count=1))
    if not text[:1].isdigit() or not text[-1:].isdigit():
        for sign in _CURRENCY.finditer(text):
            removed.append(sign[0].strip().lstrip("+-−"))
        text = _CURRENCY.sub(r"\1", text)
        if (degrees := _DEGREES.search(text)) is not None:
            removed.append(degrees[0].strip())
            text = text[: degrees.start()]
        text = _ORDINAL.sub("", text)
    if "\\" in text:
        match = _UNIT_TEXT.search(text)
        if (
            match is not None
            and match.start() > 0
            and (any(map(str.isdigit, text[: match.start()])) or "\\pi" in text[: match.start()])
        ):
            removed.append(match[0].strip())
            text = _SPACE_AT_END.sub("", text[: match.start()])
    match = _WORDS_AFTER.search(text) if any(map(str.isalpha, text)) else None
    if match is not None and _NOUNITS.search(match[0]) is None and "\\" not in match[0]:
        removed.append(match[0].strip())
        text = text[: match.start()].rstrip()
    return text


def _spaced(text: str) -> str:
    if "\\" in text or "{" in text:
        text = _THOUSANDS.sub(",", text)
        text = _SPACES.sub(" ", text).strip()
    if " " in text:
        text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    return text


def is_name(text: str) -> bool:
    """Whether letters are a name or a word, and no product of variables: `Tom`, `\\text{ab}`, `odd`."""
    bare = _WRAPPED_TEXT.sub(r"\1", text).strip().strip("$.").strip()
    if len(bare) < _SHORTEST_NAME:
        return False
    return (
        bare != text.strip().strip("$.").strip()
        or _has_capitals(bare)
        or bare.lower() in SHORT_WORDS
        or (bare.isalpha() and not _is_product(bare))
    )


def _has_capitals(text: str) -> bool:
    """Whether a line is capitalized, or has a capital behind another letter."""
    if "\n" in text or (first := _CAPITAL.search(text)) is None:
        return False
    return (
        _SMALL.search(text, 0, first.start()) is not None
        or _CAPITAL.search(text, first.end()) is not None
        or _CAPITALIZED.fullmatch(text) is not None
    )


def _is_product(letters: str) -> bool:
    return len(letters) <= _LONGEST_PRODUCT_OF_SMALL or any(set(letters) <= each for each in _VARIABLES)


_FIGURE = re.compile(
    r"\\(?P<kind>(?:measured)?angle|triangle|overline|overleftrightarrow|vec|overrightarrow|arc|wideparen|overarc)\s*"
    r"(?:\{\s*(?P<within>[A-Z]{2,6})\s*\}|(?P<beside>[A-Z]{2,6}))|(?P<sign>[∠△])\s*(?P<after>[A-Z]{2,6})"
)
_SIGNS_OF_FIGURES = {"∠": "angle", "△": "triangle", "measuredangle": "angle", "overrightarrow": "vec"}


_POINTS = re.compile(r"[A-Z]{2,6}")
_ARROWS = ("vec", "overrightarrow", "overleftrightarrow")


def figure(text: str, beside: str) -> tuple[str, str] | None:
    """Return the kind of a figure and its points, in one of the orders that name the same; None if it is not a figure.

    An angle and a segment are read from either end, a triangle from any corner, and an arrow from its tail.

    Args:
        text: Such as `\\angle ABC`.
        beside: What it is compared with: points alone are the segment, angle or triangle that the other is.
    """
    match = _FIGURE.fullmatch(text.strip()) or _FIGURE.fullmatch(beside.strip())
    if match is None:
        return None
    kind = match["kind"] or match["sign"]
    kind = _SIGNS_OF_FIGURES.get(kind, kind)
    points = match["within"] or match["beside"] or match["after"]
    if match.string != text.strip():
        # They may well be two points beside an arrow, and not a figure.
        if _POINTS.fullmatch(text.strip()) is None or kind in _ARROWS:
            return None
        points = text.strip()
    if kind == "triangle":
        return kind, "".join(sorted(points))
    return kind, points if kind == "vec" else min(points, points[::-1])


_FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:_?(?:\d{1,3}|\{\d{1,3}\}))?){1,12}")


def formula(text: str) -> str | None:
    """Return a chemical formula without the marks of its indices; None of what is none, or has no index."""
    bare = _WRAPPED_TEXT.sub(r"\1", text).strip().strip("$.")
    if not any(map(str.isdigit, bare)) or _FORMULA.fullmatch(bare) is None:
        return None
    return bare.translate(_NO_MARKS)


_NO_MARKS = str.maketrans("", "", "_{}")


def words(text: str) -> str | None:
    """Return the words that an answer is made of, in small letters; None if it is more than words."""
    bare = _WRAPPED_TEXT.sub(r" \1 ", text).strip().strip("$").strip()
    if len(bare) == 3 and bare[0] == "(" and bare[2] == ")":
        bare = bare[1]
    if _LETTERS.fullmatch(bare) is None or _LETTER_LIST.fullmatch(bare) is not None:
        return None
    bare = " ".join(bare.rstrip(".!").split())
    # A single letter may name a variable or a choice, in which case its size matters.
    return bare if len(bare) == 1 else bare.casefold()


def unwrapped(text: str) -> str:
    """Return a text without the commands of LaTeX and the dollars around its words."""
    return _WRAPPED_TEXT.sub(r" \1 ", text).replace("$", " ")


def canonical(text: str) -> str:
    """Return a form in which texts are compared as they stand."""
    text = _WRAPPED_TEXT.sub(r"\1", _SPACES.sub("", text))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = (
        text.replace("\\leq", "\\le")
        .replace("\\geq", "\\ge")
        .replace("\\neq", "\\ne")
        .replace("\\lbrace", "\\{")
    )
    text = _BRACED.sub(r"\1\2", typeset(text).replace("\\varnothing", "\\emptyset"))
    return re.sub(r"\s+", "", re.sub(r"(?<=\d)\s+(?=\d)", "|", text)).strip("$.")
