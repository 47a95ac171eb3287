"""Basic tools: a calculator, dates of the Gregorian calendar, and search over a small corpus.

The calculator is exact, with a parser of its own and within bounds. Search ranks by BM25 what is held in memory.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Context, Decimal
from fractions import Fraction

from rollgym.envs.tools.tool import Tool, ToolError, tool_parameters

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+)|([A-Za-z_]\w*)|(\*\*|//|[-+*/%^(),]))")
_LONGEST = 1_000
_DEEPEST = 50
_MOST_DIGITS = 400
_SHOWN_DIGITS = 15
_CONSTANTS: Mapping[str, Fraction] = {"pi": Fraction(math.pi), "e": Fraction(math.e)}


def calculate(expression: str) -> Fraction:
    """Return the value of an expression: + - * / // % ** and parentheses, exact wherever it is rational.

    Args:
        expression: Such as `(3 + 4) ** 2 / 7`, with `sqrt`, `abs`, `round`, `floor`, `ceil`, `min`, `max`, `gcd` and
            `factorial`, `pi` and `e`.

    Raises:
        ToolError: If it is not an expression, or its value is undefined or too large.
    """
    return _Parser(expression).value()


def number_text(value: Fraction) -> str:
    """Return a number as text: whole and finite decimal ones exactly, others with 15 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    digits = _MOST_DIGITS if rest == 1 else _SHOWN_DIGITS
    context = Context(prec=digits)
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    text = f"{quotient:f}"
    if len(text) > 2 * _SHOWN_DIGITS:
        text = str(Context(prec=_SHOWN_DIGITS).plus(quotient).normalize())
    return text.rstrip("0").rstrip(".") if "." in text and "E" not in text else text


class _Parser:
    """Recursive descent over the tokens; powers bind tighter than signs, and to the right."""

    def __init__(self, expression: str) -> None:
        if len(expression) > _LONGEST:
            raise ToolError(f"the expression has over {_LONGEST} characters")
        self._tokens = _tokens(expression)
        self._index = 0
        self._depth = 0

    def value(self) -> Fraction:
        found = self._sum()
        if self._index < len(self._tokens):
            raise ToolError(f"{self._tokens[self._index]!r} is not expected there")
        return found

    def _next(self) -> str:
        return self._tokens[self._index] if self._index < len(self._tokens) else ""

    def _take(self, wanted: str) -> bool:
        if self._next() != wanted:
            return False
        self._index += 1
        return True

    def _sum(self) -> Fraction:
        found = self._product()
        while (sign := self._next()) in ("+", "-"):
            self._index += 1
            other = self._product()
            found = _checked(found + other if sign == "+" else found - other)
        return found

    def _product(self) -> Fraction:
        found = self._signed()
        while (sign := self._next()) in ("*", "/", "//", "%"):
            self._index += 1
            other = self._signed()
            if sign != "*" and other == 0:
                raise ToolError("division by zero")
            if sign == "*":
                found = found * other
            elif sign == "/":
                found = found / other
            else:
                whole = Fraction(found // other)
                found = whole if sign == "//" else found - whole * other
            found = _checked(found)
        return found

    def _signed(self) -> Fraction:
        self._deeper()
        if self._take("-"):
            found = -self._signed()
        elif self._take("+"):
            found = self._signed()
        else:
            found = self._power()
        self._depth -= 1
        return found

    def _power(self) -> Fraction:
        base = self._atom()
        if self._next() not in ("**", "^"):
            return base
        self._index += 1
        return _power(base, self._signed())

    def _atom(self) -> Fraction:
        token = self._next()
        self._index += 1
        if token == "(":
            found = self._sum()
            self._close()
            return found
        if token[:1].isdigit() or token[:1] == ".":
            return _checked(Fraction(token))
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _FUNCTIONS:
            return self._function(token)
        if not token:
            raise ToolError("the expression ends too early")
        raise ToolError(f"{token!r} is not expected there; functions are {', '.join(_FUNCTIONS)}")

    def _function(self, name: str) -> Fraction:
        if not self._take("("):
            raise ToolError(f"{name} needs parentheses, such as {name}(4)")
        values = [self._sum()]
        while self._take(","):
            values.append(self._sum())
        self._close()
        return _checked(_FUNCTIONS[name](values))

    def _close(self) -> None:
        if not self._take(")"):
            raise ToolError("a parenthesis is not closed")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ToolError("the expression is nested too deeply")


def _tokens(expression: str) -> list[str]:
    tokens, position, end = [], 0, len(expression.rstrip())
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ToolError(f"{expression[position:].strip()[:1]!r} is no part of an expression")
        tokens.append(match[1] or match[2] or match[3])
        position = match.end()
    return tokens


def _checked(value: Fraction) -> Fraction:
    bound = int(_MOST_DIGITS * math.log2(10))
    if value.numerator.bit_length() > bound or value.denominator.bit_length() > bound:
        raise ToolError(f"a number has over {_MOST_DIGITS} digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        if base == 0 and exponent < 0:
            raise ToolError("division by zero")
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if size * abs(exponent.numerator) > 2 * _MOST_DIGITS * math.log2(10):
            raise ToolError(f"a number has over {_MOST_DIGITS} digits")
        if size == 0 and abs(base) == 1:
            return Fraction(1 if base == 1 or exponent.numerator % 2 == 0 else -1)
        return _checked(base**exponent.numerator) if base else Fraction(exponent == 0)
    if base < 0:
        raise ToolError("a power with a broken exponent of a negative number is not real")
    try:
        return Fraction(float(base) ** float(exponent))
    except (OverflowError, ZeroDivisionError) as error:
        raise ToolError("the power is too large or not defined") from error


def _root(values: list[Fraction]) -> Fraction:
    value = _one(values, "sqrt")
    if value < 0:
        raise ToolError("the square root of a negative number is not real")
    above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if Fraction(above * above, below * below) == value:
        return Fraction(above, below)
    return _power(value, Fraction(1, 2))


def _factorial(values: list[Fraction]) -> Fraction:
    value = _whole(_one(values, "factorial"), "factorial")
    if not 0 <= value <= 200:
        raise ToolError("factorial takes whole numbers from 0 to 200")
    return Fraction(math.factorial(value))


def _round(values: list[Fraction]) -> Fraction:
    if len(values) > 2:
        raise ToolError("round takes a number, and the number of decimals")
    places = _whole(values[1], "round") if len(values) == 2 else 0
    if abs(places) > 50:
        raise ToolError("round takes at most 50 decimals")
    # As at school: a half goes away from zero.
    scaled = abs(values[0]) * Fraction(10) ** places
    rounded = Fraction(math.floor(scaled + Fraction(1, 2))) / Fraction(10) ** places
    return rounded if values[0] >= 0 else -rounded


def _one(values: list[Fraction], name: str) -> Fraction:
    if len(values) != 1:
        raise ToolError(f"{name} takes one number")
    return values[0]


def _whole(value: Fraction, name: str) -> int:
    if value.denominator != 1:
        raise ToolError(f"{name} takes whole numbers")
    return value.numerator


_FUNCTIONS: Mapping[str, Callable[[list[Fraction]], Fraction]] = {
    "sqrt": _root,
    "abs": lambda values: abs(_one(values, "abs")),
    "round": _round,
    "floor": lambda values: Fraction(math.floor(_one(values, "floor"))),
    "ceil": lambda values: Fraction(math.ceil(_one(values, "ceil"))),
    "min": min,
    "max": max,
    "gcd": lambda values: Fraction(math.gcd(*(_whole(value, "gcd") for value in values))),
    "factorial": _factorial,
}


def _run(expression: str) -> str:
    return number_text(calculate(expression))


CALCULATOR = Tool(
    "calculator",
    "Compute an arithmetic expression exactly: + - * / // % ** and parentheses, sqrt, abs, round, floor, ceil, min, "
    "max, gcd, factorial, pi, e.",
    tool_parameters(["expression"], expression={"type": "string", "description": "Such as (3 + 4) ** 2 / 7"}),
    _run,
)

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FORM = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATE = {"type": "string", "description": "A date as YYYY-MM-DD"}


def _parsed(text: str) -> date:
    try:
        # Python reads more forms than one; a policy is to learn one.
        if _FORM.fullmatch(text) is None:
            raise ValueError(text)
        return date.fromisoformat(text)
    except ValueError:
        raise ToolError(f"{text[:40]!r} is no date such as 2031-03-14") from None


def _add(date: str, days: int) -> str:
    try:
        return (_parsed(date) + timedelta(days=int(days))).isoformat()
    except OverflowError:
        raise ToolError("the date is out of the years 1 to 9999") from None


def _difference(start: str, end: str) -> str:
    return str((_parsed(end) - _parsed(start)).days)


def _weekday(date: str) -> str:
    return WEEKDAYS[_parsed(date).weekday()]


DATE_TOOLS = (
    Tool(
        "date_add",
        "Return the date some days after another one, or before it where days is negative.",
        tool_parameters(["date", "days"], date=_DATE, days={"type": "integer"}),
        _add,
    ),
    Tool(
        "date_difference",
        "Return the number of days from one date to another.",
        tool_parameters(["start", "end"], start=_DATE, end=_DATE),
        _difference,
    ),
    Tool("weekday", "Return the day of the week of a date.", tool_parameters(["date"], date=_DATE), _weekday),
)

_WORD = re.compile(r"\w+")
_SATURATION, _LENGTH_WEIGHT = 1.2, 0.75
MOST_RESULTS = 10


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus, with its title."""

    title: str
    text: str


class Corpus:
    """A set of documents with full-text search."""

    def __init__(self) -> None:
        self.fill(())

    def fill(self, documents: Sequence[Document]) -> None:
        """Replace all documents, and rebuild the index."""
        self._documents = tuple(documents)
        self._counts = [Counter(_words(f"{each.title} {each.text}")) for each in documents]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0
        self._holding = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str, count: int) -> list[Document]:
        """Return the documents that fit best, the best first; those that share no word are left out."""
        words = set(_words(query))
        # Sums depend on their order, and the order of a set on the process.
        scores = [self._score(number, sorted(words)) for number in range(len(self._documents))]
        ranked = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
        return [self._documents[number] for _, number in ranked[:count]]

    def tool(self) -> Tool:
        """Return the tool that searches it."""
        return Tool(
            "search",
            "Search the encyclopedia; returns the articles that fit best.",
            tool_parameters(
                ["query"],
                query={"type": "string", "maxLength": 1_000},
                top_k={"type": "integer", "minimum": 1, "maximum": MOST_RESULTS, "default": 3},
            ),
            self._search,
        )

    def _search(self, query: str, top_k: int = 3) -> str:
        found = self.find(query, int(top_k))
        if not found:
            return "nothing was found"
        return "\n".join(
            f"Doc {number}(Title: {each.title}) {each.text}" for number, each in enumerate(found, 1)
        )

    def _score(self, number: int, words: Sequence[str]) -> float:
        counts, total = self._counts[number], len(self._documents)
        length = 1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * self._lengths[number] / self._mean_length
        score = 0.0
        for word in words:
            if (count := counts[word]) > 0:
                holding = self._holding[word]
                rarity = math.log(1 + (total - holding + 0.5) / (holding + 0.5))
                score += rarity * count * (_SATURATION + 1) / (count + _SATURATION * length)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
