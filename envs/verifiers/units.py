"""Units behind numbers: which they are, and what one is of another.

A unit that is said on one side alone means nothing. Where both sides say one, and both are known, a length is no area,
and 500 cm are 5 m.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rollgym.envs.verifiers.exact import Value, divide, multiply, value_of

Dimension = frozenset[tuple[str, int]]
_LONGEST = 80


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measurement.

    Attributes:
        dimension: What it measures: names of dimensions with their powers.
        factor: How much of the dimension's own unit it is.
    """

    dimension: Dimension
    factor: Value


def _table(**dimensions: Mapping[str, Fraction | int]) -> dict[str, tuple[str, int, Value]]:
    """Return each unit by its names, which are written as `m metre metres`."""
    return {
        name: (
            dimension.rstrip("23"),
            int(dimension[-1]) if dimension[-1].isdigit() else 1,
            value_of(Fraction(factor)),
        )
        for dimension, units in dimensions.items()
        for names, factor in units.items()
        for name in names.split()
    }


_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000_000)
_GALLON = 231 * _INCH**3
_UNITS = _table(
    length={
        "nm nanometer nanometers nanometre nanometres": Fraction(1, 10**9),
        "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
        "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
        "dm decimeter decimeters decimetre decimetres": Fraction(1, 10),
        "m meter meters metre metres": 1,
        "km kilometer kilometers kilometre kilometres": 1000,
        "in inch inches": _INCH,
        "ft foot feet": 12 * _INCH,
        "yd yds yard yards": 36 * _INCH,
        "mi mile miles": 63_360 * _INCH,
    },
    length2={"ha hectare hectares": 10**4, "acre acres": 4840 * (36 * _INCH) ** 2},
    length3={
        "ml mL milliliter milliliters millilitre millilitres": Fraction(1, 10**6),
        "cl cL centiliter centiliters centilitre centilitres": Fraction(1, 10**5),
        "dl dL deciliter deciliters decilitre decilitres": Fraction(1, 10**4),
        "l L liter liters litre litres": Fraction(1, 1000),
        "pint pints": _GALLON / 8,
        "qt quart quarts": _GALLON / 4,
        "gal gallon gallons": _GALLON,
    },
    mass={
        "mg milligram milligrams": Fraction(1, 10**6),
        "g gram grams": Fraction(1, 1000),
        "kg kilogram kilograms": 1,
        "t tonne tonnes": 1000,
        "oz ounce ounces": _POUND / 16,
        "lb lbs": _POUND,
    },
    time={
        "ms millisecond milliseconds": Fraction(1, 1000),
        "s sec secs second seconds": 1,
        "min mins minute minutes": 60,
        "h hr hrs hour hours": 3600,
        "day days": 86_400,
        "week weeks": 7 * 86_400,
    },
    # A year is no fixed number of days.
    months={"month months": 1, "year years": 12},
    energy={"J joule joules": 1, "kJ kilojoule kilojoules": 1000, "kWh": 3_600_000},
    power={"W watt watts": 1, "kW kilowatt kilowatts": 1000},
    force={"N newton newtons": 1, "kN": 1000},
    frequency={"Hz hertz": 1, "kHz": 1000, "MHz": 10**6},
    celsius={"°C": 1},
    fahrenheit={"°F": 1},
    kelvin={"K kelvin kelvins": 1},
    dollars={"$ USD dollar dollars": 1, "¢ cent cents": Fraction(1, 100)},
    euros={"€ EUR euro euros": 1},
    sterling={"£ GBP": 1},
    yen={"¥ JPY yen": 1},
    morning={"am": 1},
    afternoon={"pm": 1},
)
_DEGREES = frozenset({"°", "deg", "degree", "degrees"})
_RADIANS = frozenset({"rad", "rads", "radian", "radians"})
_HALF_TURN: Value = {(1, 1): Fraction(1, 180)}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h"}

_REPLACED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\}){1,40})\}\s*\{((?:[^{}]|\{[^{}]*\}){1,40})\}", r"\1/\2"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|\\circ(?![a-z])", "° "),
        (r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)(?![a-z])", " "),
        (r"\\(?:cdot|times)(?![a-z])|·|×", "*"),
        (r"\\(?:[,;:! ]|quad|qquad)|~|\{,\}", " "),
        (r"\\(?=[$%])", ""),
        (r"²", "^2"),
        (r"³", "^3"),
        (r"[{}]", ""),
        (r"\b(?:hundred|thousand|million|billion|trillion)s?\b", " "),
        (r"\b(?:square|sq\b\.?)\s*([a-zA-Z]+)", r"\1^2"),
        (r"\b(?:cubic|cu\b\.?)\s*([a-zA-Z]+)", r"\1^3"),
        (r"\b([a-zA-Z]+)\s+squared\b", r"\1^2"),
        (r"\b([a-zA-Z]+)\s+cubed\b", r"\1^3"),
        (r"\bper\b", "/"),
        (r"\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"°\s*(?:celsius\b|Celsius\b|C\b)", "°C"),
        (r"°\s*(?:fahrenheit\b|Fahrenheit\b|F\b)", "°F"),
        (r"\s*\^\s*", "^"),
        (r"\s*/\s*", "/"),
    )
)
_FACTORS = re.compile(r"(/?)(°[CF]?|[a-zA-Z]+|[$€£¥¢])(?:\^(-?\d))?(?:\s|\*|(?=/)|(?<=[$€£¥¢°])|$)")


@lru_cache(maxsize=1024)
def unit_of(text: str) -> Unit | None:
    r"""Return the unit that a text names; None where it names none that is known here.

    Args:
        text: Such as `cm`, `\text{ km}/\text{h}`, `square feet`, `dollars per hour` or `^\circ`.
    """
    if len(text) > _LONGEST:
        return None
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).strip(" .,")
    factors: list[tuple[str, int]] = []
    position = 0
    while position < len(text):
        match = _FACTORS.match(text, position)
        if match is None:
            return None
        power = int(match[3] or 1) * (-1 if match[1] else 1)
        position = match.end()
        if (speed := _SPEEDS.get(match[2].lower())) is not None:
            above, below = speed.split("/")
            factors += [(above, power), (below, -power)]
        else:
            factors.append((match[2], power))
    return _product(factors) if factors else None


def _product(factors: Iterable[tuple[str, int]]) -> Unit | None:
    dimensions: Counter[str] = Counter()
    total = value_of(Fraction(1))
    for name, power in factors:
        known = _known(name)
        if known is None:
            return None
        dimension, degree, factor = known
        dimensions[dimension] += degree * power
        for _ in range(abs(power)):
            total = multiply(total, factor) if power > 0 else divide(total, factor)
    return Unit(frozenset((name, power) for name, power in dimensions.items() if power), total)


def _known(name: str) -> tuple[str, int, Value] | None:
    lower = name.lower()
    if lower in _DEGREES:
        return "angle", 1, _HALF_TURN
    if lower in _RADIANS:
        return "angle", 1, value_of(Fraction(1))
    # The size of a letter matters where it stands alone: K is no k.
    return _UNITS.get(name) or (_UNITS.get(lower) if len(name) > 1 else None)
