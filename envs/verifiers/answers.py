"""What an answer says, read as far as exact arithmetic and its form go: no search, no guessing."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from rollgym.envs.verifiers.exact import NotExact, Value, add, approximate, divide, multiply, scale, value_of
from rollgym.envs.verifiers.latex import is_name, plain, words
from rollgym.envs.verifiers.numerals import (
    ComposedNumber,
    decimals,
    exact_number,
    read_composed,
    spelt_number,
)
from rollgym.envs.verifiers.units import Unit, unit_of

_KEPT = 1024
# "1,22" is one number where commas are decimal signs, and two elsewhere.
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
# Possessive, and from the beginning of a run of blanks alone: a run is looked at once.
_BETWEEN = re.compile(
    r"(?<![,\s])[,\s]++(?<=\s)(?:or|and)\s++|(?<!\s)\s*+,?\s*+\\text\{\s*+(?:or|and)\s*+\}\s*+"
)
_NAME = re.compile(
    r"\\?[a-zA-Z]{1,12}'*(?:_(?:\w|\{\w{1,5}\}))?(?:\s?\([^()=+*/^-]{0,20}\))?(?:\s+[A-Z]{1,4})?"
)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])|≈")
_EQUALS = re.compile(r"=|≈|≡|\\(?:approx|equiv|simeq|doteq)(?![a-zA-Z])")
_NOT_EQUAL = re.compile(r"\\(?:neq?|leq?|geq?|not)(?![a-zA-Z])|[!<>:=]=|[≠<>≤≥]|\\pm")
_DENIAL = re.compile(r"(?:\\?[a-zA-Z]\w?)?\s*(?:\\neq?(?![a-zA-Z])|\\not\s*=|!=|≠)\s*(.+)", re.DOTALL)
# An inequality around a letter, or before a number; what was cut off behind its sign is none.
_RELATION = re.compile(r"(?:\\(?:neq?|leqslant|geqslant|leq?|geq?|lt|gt)(?![a-zA-Z])|!=|[≠<>≤≥])\s*+\S")
_MATRIX = re.compile(
    r"(?:(?:\\left)?\s*[(\[]\s*)?\\begin\s*\{(?P<kind>(?:[pbB]|small|psmall|bsmall)?matrix\*?|array)\}"
    r"(?:\s*(?:\[[^\]]*\]|\{[^{}]*\}))?(?P<body>.*)\\end\s*\{(?P=kind)\}(?:\s*(?:\\right)?\s*[)\]])?",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![a-zA-Z])")
_CASES = re.compile(
    r"(?:\\left\s*\\\{\s*)?\\begin\s*\{cases\}(?P<body>[^&]*)\\end\s*\{cases\}(?:\s*\\right\s*\.)?", re.DOTALL
)
_ALIGNED = re.compile(
    r"\\begin\s*\{(?P<kind>aligned|align\*?|split|gathered)\}(?P<body>.*)\\end\s*\{(?P=kind)\}", re.DOTALL
)
_NAMED = re.compile(r"\s*(\\?[a-zA-Z]{1,12}(?:_(?:\w|\{\w{1,5}\}))?)\s*=(?!=)")
_TUPLE_OF_NAMES = re.compile(r"\((?P<names>[^()=]+)\)\s*=\s*\((?P<values>.+)\)", re.DOTALL)
_EITHER_SIGN = re.compile(r"\\pm(?![a-zA-Z])|±")
_UNIT_FACTOR = r"[a-zA-ZµΩ]{1,3}(?:\s?\^\s?\{?-?[1-3]\}?)?"
_BARE_UNIT = re.compile(
    r"(?P<number>.{1,40}?)(?:\s|~|\\,){0,8}(?P<unit>[mgshtlLNJWKVACFΩ](?:\s?(?:\^\s?\{?-?[1-3]\}?|[²³]))?"
    # "m s^{-1}", "N m" and "J/s" are units where all their factors are.
    rf"|(?P<product>{_UNIT_FACTOR}(?:\s?(?:\s|\\cdot|\*|\\,|/)\s?{_UNIT_FACTOR}){{1,3}}))"
)
_STERLING = frozenset({("sterling", 1)})
# Rounded values are written behind an equals sign, too.
_ABOUT_EQUAL = 0.02
_AROUND_LIST = re.compile(r"^(?:[\s$({\[]|\\[({\[]|\\left(?![a-z])|\\text\s*\{)+")
_OPENING = {"(": "(", "[": "[", "\\{": "{", "{": "{"}
_CLOSING = (")", "]", "\\}", "}")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer read as far as it can be: a number, a list of them, a matrix, what it is not, words, or mere text."""

    text: str
    percent: bool
    value: Value | None = None
    parts: tuple["Answer", ...] = ()
    brackets: str = ""
    said: str | None = None
    places: int | None = None
    rows: tuple[tuple["Answer", ...], ...] = ()
    denied: "Answer | None" = None
    relation: bool = False
    name: str | None = None
    composed: ComposedNumber | None = None
    scale: int = 1
    unit: str = ""
    is_name: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether it is a number, a list or matrix of them, or words: what is compared without a search."""
        if self.denied is not None:
            return self.denied.is_exact
        inner = [*self.parts, *(entry for row in self.rows for entry in row)]
        if inner:
            return all(each.is_exact for each in inner)
        return self.value is not None or (self.said is not None and len(self.said) > 3)

    @property
    def quantity(self) -> "Quantity | None":
        """How much it is of a unit that is known; None if it names none."""
        if self.value is not None:
            unit = unit_of(self.unit) if self.unit and not self.percent else None
            return None if unit is None else Quantity(scale(self.value, Fraction(self.scale)), unit)
        if self.composed is not None and self.composed.kind == "quantity":
            return _total(self.composed)
        match = _BARE_UNIT.fullmatch(self.text)
        unit = None if match is None else unit_of(match["unit"])
        if match is None or unit is None:
            return None
        try:
            return Quantity(exact_number(match["number"]), unit, "" if match["product"] else match["unit"])
        except NotExact:
            return None

    def beside(self, other: "Quantity") -> "Quantity":
        """The quantity as it is meant beside another: pounds are a currency where pounds sterling are."""
        own = self.quantity
        assert own is not None
        if other.unit.dimension != _STERLING or "pound" not in self.unit or self.value is None:
            return own
        return Quantity(scale(self.value, Fraction(self.scale)), Unit(_STERLING, value_of(Fraction(1))))

    @property
    def names(self) -> list[str] | None:
        """The names of the parts of a list if each has one of its own: they say what is equal to what."""
        names = [part.name for part in self.parts if part.name is not None]
        return names if len(set(names)) == len(self.parts) > 1 else None

    def beside_a_list(self) -> "Answer":
        """The answer as it is read when compared with a list: beside one, "8,6" is one, too."""
        if self.parts or _DECIMAL_COMMA.fullmatch(self.text) is None:
            return self
        return replace(self, parts=tuple(map(read_answer, self.text.split(","))))


@dataclass(frozen=True, slots=True)
class Quantity:
    """So much of a unit.

    Attributes:
        value: How much.
        unit: Of what.
        letter: The unit as it is written if it could be a variable as well.
    """

    value: Value
    unit: Unit
    letter: str = ""


def _total(composed: ComposedNumber) -> Quantity | None:
    """Return the sum of a quantity in several units, in the first of them."""
    units = [unit_of(name) for name in composed.names]
    first = units[0]
    if first is None:
        return None
    total: Value = {}
    for number, unit in zip(composed.numbers, units, strict=True):
        if unit is None or unit.dimension != first.dimension:
            return None
        total = add(total, multiply(value_of(number), divide(unit.factor, first.factor)))
    return Quantity(total, first)


def read_answer(answer: str, *, is_denied: bool = False) -> Answer:
    """Read what stands where an answer is given.

    Args:
        answer: It.
        is_denied: Whether it is what another answer is not. A denial in it is not read: a thousand of them in a row
            would be as many calls within each other.
    """
    try:
        # Most answers: there is nothing to take away from them.
        return Answer(answer, False, value=exact_number(answer), places=decimals(answer))
    except NotExact:
        pass
    # What is emphasised is what it is.
    answer = answer.strip().strip("*_`").strip()
    read = _read_form(answer, is_denied)
    composed = None if read.value is not None else read_composed(answer)
    return read if composed is None else replace(read, composed=composed)


# A reference is compared with the responses of a whole group, and again in later passes.
read_reference = lru_cache(maxsize=_KEPT)(read_answer)


def _read_form(answer: str, is_denied: bool) -> Answer:
    if "\\begin" in answer:
        if rows := _matrix(answer):
            return Answer(answer, False, rows=rows)
        if (lines := _ALIGNED.fullmatch(answer.strip().strip("$.").strip())) is not None:
            # A line that begins with an equals sign continues the one before it.
            rows_of_it = [row.replace("&", " ").strip() for row in _ROW_END.split(lines["body"])]
            answer = "".join(
                row if not number or row.startswith("=") else f", {row}"
                for number, row in enumerate(filter(None, rows_of_it))
            )
        if (cases := _CASES.fullmatch(answer.strip().strip("$.").strip())) is not None:
            answer = ", ".join(
                row.strip().rstrip(",") for row in _ROW_END.split(cases["body"]) if row.strip()
            )
    form = plain(answer)
    text = form.text
    try:
        return Answer(
            text,
            form.percent,
            value=exact_number(text),
            places=decimals(text),
            scale=form.scale,
            unit=form.unit,
        )
    except NotExact:
        pass
    if (values := both_signs(text)) != text:
        return read_answer(values)
    denial = None if is_denied else _DENIAL.fullmatch(text)
    if denial is not None:
        return Answer(text, form.percent, denied=read_answer(denial[1], is_denied=True))
    if "=" in text and (named := _named_tuple(text)):
        return Answer(text, form.percent, parts=named)
    if not _holds(text):
        # A false equation is not an answer, whatever it ends with.
        return Answer(text, form.percent, relation=True)
    if "=" in text and (side := _last_side(text)) is not None:
        return read_answer(side)
    said = words(text)
    if said is not None and (spelt := spelt_number(said)) is not None:
        return Answer(text, form.percent, value=value_of(Fraction(spelt)), unit=form.unit)
    if said is not None:
        return Answer(text, form.percent, said=said, is_name=is_name(answer))
    brackets, inner = _unbracketed(text)
    parts = [text] if not brackets and _DECIMAL_COMMA.fullmatch(text) else _split(inner)
    if len(parts) > 1 or (brackets == "{}" and inner):
        if not brackets and form.unit and unit_of(form.unit) is not None:
            # It stood behind the last part, and was taken from the whole.
            parts[-1] = f"{parts[-1]} {form.unit}"
        named = _named_parts(answer, parts)
        return Answer(text, form.percent, parts=named, brackets=brackets, unit=form.unit)
    return Answer(text, form.percent, relation=_RELATION.search(text) is not None, unit=form.unit)


def _named_parts(answer: str, parts: list[str]) -> tuple[Answer, ...]:
    """Read the parts of a list, each with the name that it is given, as in `x = 1, y = 2`."""
    # The first name stands before the whole list, too, and is taken away with what means nothing.
    begin = _AROUND_LIST.sub("", answer)
    named = [_NAMED.match(begin if number == 0 else part.lstrip("$ ")) for number, part in enumerate(parts)]
    return tuple(
        replace(read_answer(part), name=None if name is None else name[1])
        for part, name in zip(parts, named, strict=True)
    )


def _named_tuple(text: str) -> tuple[Answer, ...]:
    """Read `(x, y) = (1, 2)` as `x = 1, y = 2`; nothing if a text is not such an equation."""
    match = _TUPLE_OF_NAMES.fullmatch(text)
    if match is None or not _encloses(text, match.start("values"), match.end("values")):
        return ()
    names, values = _split(match["names"]), _split(match["values"])
    if len(names) != len(values) or len(names) < 2 or not all(map(_NAME.fullmatch, names)):
        return ()
    return tuple(replace(read_answer(value), name=name) for name, value in zip(names, values, strict=True))


def _matrix(text: str) -> tuple[tuple[Answer, ...], ...]:
    """Return the rows of a matrix; nothing if a text is more than one, or none."""
    match = _MATRIX.fullmatch(text.strip().strip("$.").strip())
    if match is None or "\\begin" in match["body"]:
        return ()
    rows = [row.strip() for row in _ROW_END.split(match["body"])]
    while rows and not rows[-1]:
        rows.pop()
    return tuple(tuple(read_answer(entry.strip()) for entry in row.split("&")) for row in rows)


def _last_side(text: str) -> str | None:
    """Return what a chain of equalities comes to: its last side, where all behind the first are numbers.

    The first may be a name, or a number that is worked out; an equation with an unknown is not a chain. What
    a side is about equal to is not a side.
    """
    if _NOT_EQUAL.search(text) is not None:
        return None
    first, *others = _APPROXIMATELY.split(text, maxsplit=1)[0].split("=")
    if not others or not all(map(_is_number, others)):
        return None
    return others[-1].strip() if _NAME.fullmatch(first.strip()) or _is_number(first) else None


def _holds(chain: str) -> bool:
    """Whether numbers that are called equal are about so, as in `0.67 = 2/3`; what is worked out is not looked at."""
    *plainly, last = _EQUALS.split(chain)
    if not plainly or not _is_number(last) or any(decimals(each) is None for each in plainly):
        return True
    end = plain(last)
    if end.unit:
        return True
    share = Fraction(end.scale, 100 if end.percent else 1)
    values = [*(exact_number(each) for each in plainly), scale(exact_number(end.text), share)]
    one, *others = map(approximate, values)
    return all(each == one or abs(each - one) <= _ABOUT_EQUAL * abs(one) for each in others)


def _is_number(text: str) -> bool:
    try:
        exact_number(plain(text).text)
    except NotExact:
        return False
    return True


def _unbracketed(text: str) -> tuple[str, str]:
    """Return the brackets around a whole text, and what is within."""
    for opening, sign in _OPENING.items():
        if text.startswith(opening):
            for closing in _CLOSING:
                if text.endswith(closing) and _encloses(text, len(opening), len(text) - len(closing)):
                    return sign + closing[-1], text[len(opening) : -len(closing)].strip()
    return "", text


def both_signs(text: str) -> str:
    r"""Return the two values that a text with one `\pm` stands for, as a list; the text itself if that is not plain.

    `\frac{1 \pm \sqrt{5}}{2}` is `\frac{1 + \sqrt{5}}{2}, \frac{1 - \sqrt{5}}{2}`.
    """
    if _EITHER_SIGN.search(text) is None or "\\mp" in text:
        return text
    form = plain(text).text
    brackets, inner = _unbracketed(form)
    parts = _split(inner if brackets == "{}" else form)
    if any(len(_EITHER_SIGN.findall(part)) > 1 for part in parts):
        return text
    # The plus of a number that begins with it means nothing.
    signs = (("(?:^|(?<=[({]))" + _EITHER_SIGN.pattern, ""), (_EITHER_SIGN.pattern, "+"))
    values: list[str] = []
    for part in parts:
        if _EITHER_SIGN.search(part) is None:
            values.append(part)
            continue
        plus = part
        for pattern, sign in signs:
            plus = re.sub(pattern, sign, plus)
        values += [plus, _EITHER_SIGN.sub("-", part)]
    return ", ".join(values)


def _encloses(text: str, start: int, end: int) -> bool:
    """Whether the brackets before `start` and from `end` on belong together."""
    if end < start:
        return False
    depth = 0
    for character in text[start:end]:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """Split at the commas (or semicolons) that stand within no brackets.

    Words such as "and" separate, too.
    """
    pieces = _BETWEEN.split(text)
    if len(pieces) > 1 and all(pieces):
        return [part for piece in pieces for part in _split(piece)]
    sign = ";" if ";" in text else ","
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == sign and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return parts if all(parts) else [text]
