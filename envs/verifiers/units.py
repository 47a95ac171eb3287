"""Units behind numbers: which they are, and what one is of another.

A unit that one side alone names means nothing. If both sides name one, and both are known, a length is not an area,
and 500 cm are 5 m; if one of them is not known, other words are another unit.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rollgym.envs.verifiers.exact import Value, divide, multiply, rational, value_of

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


_PREFIXES = {
    "p pico": Fraction(1, 10**12),
    "n nano": Fraction(1, 10**9),
    "u µ μ micro": Fraction(1, 10**6),
    "m milli": Fraction(1, 1000),
    "k kilo": Fraction(1000),
    "M mega": Fraction(10**6),
    "G giga": Fraction(10**9),
    "T tera": Fraction(10**12),
}


def _with_prefixes(names: str, factor: Fraction | int = 1) -> dict[str, Fraction | int]:
    """Return a unit, by its sign and then its names, with all that the prefixes of SI make of it."""
    sign, *spelt = names.split()
    table: dict[str, Fraction | int] = {names: factor}
    for prefix, share in _PREFIXES.items():
        *short, long = prefix.split()
        made = [f"{each}{sign}" for each in short] + [f"{long}{each}" for each in spelt]
        table[" ".join(made)] = share * factor
    return table


_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000_000)
_GALLON = 231 * _INCH**3
_CALORIE = Fraction(4184, 1000)
# What stands later is what a name means: "pm" is not a length, and "Pa" not a power.
_UNITS = _table(
    length={
        **_with_prefixes("m meter meters metre metres"),
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
        "nmi": 1852,
        "lightyear lightyears ly": 9_460_730_472_580_800,
    },
    length2={"ha hectare hectares": 10**4, "acre acres": 4840 * (36 * _INCH) ** 2},
    length3={
        **_with_prefixes("L liter liters litre litres", Fraction(1, 1000)),
        "ml mL milliliter milliliters millilitre millilitres": Fraction(1, 10**6),
        "cl cL centiliter centiliters centilitre centilitres": Fraction(1, 10**5),
        "dl dL deciliter deciliters decilitre decilitres": Fraction(1, 10**4),
        "l L liter liters litre litres": Fraction(1, 1000),
        "tsp teaspoon teaspoons": _GALLON / 768,
        "tbsp tablespoon tablespoons": _GALLON / 256,
        "floz": _GALLON / 128,
        "cup cups": _GALLON / 16,
        "pint pints": _GALLON / 8,
        "qt quart quarts": _GALLON / 4,
        "gal gallon gallons": _GALLON,
    },
    mass={
        **_with_prefixes("g gram grams", Fraction(1, 1000)),
        "mg milligram milligrams": Fraction(1, 10**6),
        "g gram grams": Fraction(1, 1000),
        "kg kilogram kilograms": 1,
        "t tonne tonnes": 1000,
        "oz ounce ounces": _POUND / 16,
        "lb lbs pound pounds": _POUND,
        "stone stones": 14 * _POUND,
    },
    time={
        "ps picosecond picoseconds": Fraction(1, 10**12),
        "ns nanosecond nanoseconds": Fraction(1, 10**9),
        "us µs μs microsecond microseconds": Fraction(1, 10**6),
        "ms millisecond milliseconds": Fraction(1, 1000),
        "s sec secs second seconds": 1,
        "min mins minute minutes": 60,
        "h hr hrs hour hours": 3600,
        "day days": 86_400,
        "week weeks": 7 * 86_400,
    },
    # A year has no fixed number of days.
    months={
        "month months": 1,
        "yr yrs year years": 12,
        "decade decades": 120,
        "century centuries": 1200,
        "millennium millennia": 12_000,
    },
    energy={
        **_with_prefixes("J joule joules"),
        **_with_prefixes("Wh", 3600),
        **_with_prefixes("cal calorie calories", _CALORIE),
        # In electronvolts, by their definition.
        **_with_prefixes("eV electronvolt electronvolts", Fraction(1_602_176_634, 10**28)),
    },
    power=_with_prefixes("W watt watts"),
    force=_with_prefixes("N newton newtons"),
    pressure={
        **_with_prefixes("Pa pascal pascals"),
        "bar bars": 10**5,
        "atm atmosphere atmospheres": 101_325,
    },
    frequency={**_with_prefixes("Hz hertz"), "rpm": Fraction(1, 60)},
    amount=_with_prefixes("mol mole moles"),
    charge=_with_prefixes("C coulomb coulombs"),
    current=_with_prefixes("A ampere amperes amp amps"),
    voltage=_with_prefixes("V volt volts"),
    resistance=_with_prefixes("Ω ohm ohms"),
    capacity=_with_prefixes("F farad farads"),
    information={
        **_with_prefixes("b bit bits"),
        **_with_prefixes("B byte bytes", 8),
        "bit bits": 1,
        "byte bytes": 8,
        "KB kilobyte kilobytes": 8000,
        "KiB kibibyte kibibytes": 8 * 1024,
        "MiB mebibyte mebibytes": 8 * 1024**2,
        "GiB gibibyte gibibytes": 8 * 1024**3,
    },
    loudness={"dB decibel decibels": 1},
    celsius={"°C": 1},
    fahrenheit={"°F": 1},
    kelvin={"K kelvin kelvins": 1},
    dollars={"$ USD dollar dollars": 1, "¢ cent cents": Fraction(1, 100)},
    euros={"€ EUR euro euros": 1},
    sterling={"£ GBP": 1, "pence penny": Fraction(1, 100)},
    rupees={"₹ INR rupee rupees": 1},
    yuan={"CNY RMB yuan": 1},
    rubles={"RUB ruble rubles rouble roubles": 1},
    pesos={"MXN peso pesos": 1},
    francs={"CHF franc francs": 1},
    yen={"¥ JPY yen": 1},
    morning={"am": 1},
    afternoon={"pm": 1},
)
# Short names that may be products of variables, or parts of figures, when right beside a number.
_OF_TWO_LETTERS = frozenset(
    {
        *("mm", "cm", "dm", "km", "nm", "mi", "ft", "in", "yd", "kg", "mg", "oz", "lb", "ml", "mL"),
        *("cl", "cL", "dl", "dL", "qt", "ha", "ms", "ns", "hr", "yr", "am", "pm", "Hz", "Pa", "eV"),
        *("Wh", "kW", "mW", "MW", "GW", "TW", "kJ", "kN", "kV", "mV", "kA", "mA", "kB", "KB", "MB"),
        *("GB", "TB", "dB"),
    }
)
ABBREVIATIONS = sorted(
    (
        name
        for name in _UNITS
        if 2 <= len(name) <= 4
        and name.isascii()
        and name.isalpha()
        and (len(name) > 2 or name in _OF_TWO_LETTERS)
    ),
    key=len,
    reverse=True,
)
"""Short names of units that are known, the longest first."""
# What is measured by a product of other units.
_DERIVED: Mapping[str, Mapping[str, int]] = {
    "frequency": {"time": -1},
    "force": {"mass": 1, "length": 1, "time": -2},
    "energy": {"mass": 1, "length": 2, "time": -2},
    "power": {"mass": 1, "length": 2, "time": -3},
    "pressure": {"mass": 1, "length": -1, "time": -2},
    "charge": {"current": 1, "time": 1},
    "voltage": {"mass": 1, "length": 2, "time": -3, "current": -1},
    "resistance": {"mass": 1, "length": 2, "time": -3, "current": -2},
    "capacity": {"mass": -1, "length": -2, "time": 4, "current": 2},
}
_DEGREES = frozenset({"°", "deg", "degree", "degrees"})
_RADIANS = frozenset({"rad", "rads", "radian", "radians"})
_HALF_TURN: Value = {(1, 1): Fraction(1, 180)}
_SPEEDS = {
    **{"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h"},
    **{"kt": "nmi/h", "kn": "nmi/h", "kts": "nmi/h", "knot": "nmi/h", "knots": "nmi/h"},
}

_REPLACED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\}){1,40})\}\s*\{((?:[^{}]|\{[^{}]*\}){1,40})\}", r"\1/\2"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|\\circ(?![a-z])", "° "),
        (r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)(?![a-z])", " "),
        (r"\\(?:cdot|times)(?![a-z])|·|×", "*"),
        (r"\\(?:[,;:! ]|quad|qquad)|~|\{,\}", " "),
        (r"\\(?=[$%])", ""),
        (r"\b([a-zA-Z]{1,2})([23])(?!\w)", r"\1^\2"),
        (r"²", "^2"),
        (r"³", "^3"),
        (r"[{}]", ""),
        (r"\b(?:dozen|hundred|thousand|million|billion|trillion)s?\b", " "),
        (r"\blight[\s-]*(years?)\b", r"light\1"),
        (r"\bnautical\s+miles?\b", "nmi"),
        (r"\b(?:fl\.?|fluid)\s*(?:oz|ounces?)\b", "floz"),
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
_FACTORS = re.compile(r"(/?)(°[CF]?|[a-zA-ZµμΩ]+|[$€£¥¢₹])(?:\^(-?\d))?(?:\s|\*|(?=/)|(?<=[$€£¥¢₹°])|$)")


@lru_cache(maxsize=1024)
def unit_of(text: str) -> Unit | None:
    r"""Return the unit that a text names; None if it names none that is known here.

    Args:
        text: Such as `cm`, `\text{ km}/\text{h}`, `square feet`, `dollars per hour` or `^\circ`.
    """
    if len(text) > _LONGEST:
        return None
    text = _in_one_form(text)
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
        elif match[2].endswith("ps") and _UNITS.get(match[2][:-2], ("",))[0] == "information":
            factors += [(match[2][:-2], power), ("s", -power)]
        else:
            factors.append((match[2], power))
    return _product(factors) if factors else None


_KELVIN: Mapping[str, tuple[Fraction, Fraction]] = {
    "kelvin": (Fraction(1), Fraction(0)),
    "celsius": (Fraction(1), Fraction(27_315, 100)),
    "fahrenheit": (Fraction(5, 9), Fraction(45_967, 180)),
}


def in_kelvin(value: Value, unit: Unit) -> Fraction | None:
    """Return a temperature by the absolute scale; None of what is none, or no fraction."""
    number = rational(value)
    if number is None or len(unit.dimension) != 1:
        return None
    ((name, power),) = unit.dimension
    if name not in _KELVIN or power != 1:
        return None
    factor, shift = _KELVIN[name]
    return number * factor + shift


def _in_one_form(text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).strip(" .,")


_WORD = re.compile(r"([^\W\d_]+|°[CF]?|[$€£¥¢₹])(\^-?\d)?")
_NO_UNIT = frozenset(
    {
        *("a", "all", "an", "and", "are", "at", "by", "each", "for", "in", "is", "it", "of", "on"),
        *("or", "so", "that", "the", "them", "there", "they", "to", "total", "was"),
    }
)
# What is counted where nothing is measured: any of these is said for any other, and for what has a name of its own.
_COUNTED = frozenset(
    {
        *(
            "piece",
            "item",
            "thing",
            "arrangement",
            "case",
            "choice",
            "combination",
            "configuration",
            "number",
            "object",
        ),
        *("option", "ordering", "outcome", "pair", "permutation", "place", "point", "possibility"),
        *("solution", "unit", "value", "way"),
    }
)


@lru_cache(maxsize=1024)
def _words_of(text: str) -> frozenset[tuple[object, str]]:
    """Return the words of a unit with their powers: a unit that is known by what it is, and the plural by its noun."""
    words = set[tuple[object, str]]()
    for word, power in _WORD.findall(_in_one_form(text[:_LONGEST])):
        known = _known(word)
        noun = word if len(word) <= 3 else re.sub(r"(?<=[^s])s$", "", re.sub("ies$", "y", word.casefold()))
        if word.casefold() not in _NO_UNIT or word in ("$", "°"):
            words.add((known[:2] + tuple(known[2].items()) if known is not None else noun, power))
    return frozenset(words)


def contradict(one: str, other: str) -> bool:
    """Whether what stands behind two numbers cannot be the same unit, known or not.

    Args:
        one: Such as `kHz`, `apples in all` or `years old`.
        other: The same; one that says nothing contradicts none.
    """
    first, second = unit_of(one), unit_of(other)
    if first is not None and second is not None:
        return first != second
    mine, theirs = _words_of(one), _words_of(other)
    if not mine or not theirs or mine <= theirs or theirs <= mine:
        return False
    measured, too = (
        frozenset(each for each in words if isinstance(each[0], tuple)) for words in (mine, theirs)
    )
    if measured or too:
        generic = {power for noun, power in mine ^ theirs if noun == "unit"}
        return measured != too and not any(power in generic for _, power in measured ^ too)
    counted = (any(noun in _COUNTED and not power for noun, power in words) for words in (mine, theirs))
    return not any(counted)


def _product(factors: Iterable[tuple[str, int]]) -> Unit | None:
    dimensions: Counter[str] = Counter()
    total = value_of(Fraction(1))
    for name, power in factors:
        known = _known(name)
        if known is None:
            return None
        dimension, degree, factor = known
        for base, times in _DERIVED.get(dimension, {dimension: 1}).items():
            dimensions[base] += degree * power * times
        for _ in range(abs(power)):
            total = multiply(total, factor) if power > 0 else divide(total, factor)
    return Unit(frozenset((name, power) for name, power in dimensions.items() if power), total)


def _known(name: str) -> tuple[str, int, Value] | None:
    lower = name.lower()
    if lower in _DEGREES:
        return "angle", 1, _HALF_TURN
    if lower in _RADIANS:
        return "angle", 1, value_of(Fraction(1))
    # The case of a single letter matters: K is not k.
    return _UNITS.get(name) or (_UNITS.get(lower) if len(name) > 1 else None)
