"""Tasks for tools, with answers that can be checked and a plan that finds them.

They are about a small made-up world: cities and people with facts, each with an article, none known beforehand.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.tools.basic_tools import WEEKDAYS, Document, calculate, number_text

_STARTS = (
    "Bel",
    "Cor",
    "Dra",
    "Els",
    "Fen",
    "Gal",
    "Hol",
    "Ist",
    "Jor",
    "Kes",
    "Lum",
    "Mar",
    "Nor",
    "Ost",
    "Pel",
    "Quel",
)
_MIDDLES = ("a", "e", "i", "o", "u", "an", "er", "il", "on", "ar")
_ENDS = ("burg", "dale", "ford", "gate", "haven", "lund", "mouth", "stad", "ton", "wick", "mere", "holm")
_GIVEN = (
    "Ada",
    "Bruno",
    "Clara",
    "Dario",
    "Edda",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Lars",
    "Mila",
)
_TRADES = ("painter", "engineer", "botanist", "composer", "astronomer", "architect", "chemist", "novelist")
_WARES = ("amber", "cheese", "clocks", "glass", "paper", "salt", "silk", "tiles")
_CITIES, _PEOPLE = 10, 8


@dataclass(frozen=True, slots=True)
class City:
    """A city and what is known of it."""

    name: str
    population: int
    founded: int
    river: str
    ware: str


@dataclass(frozen=True, slots=True)
class Person:
    """A person, born in a city."""

    name: str
    trade: str
    born: int
    birthplace: City


@dataclass(frozen=True, slots=True)
class ToolWorld:
    """Cities, people, and an article on each."""

    cities: tuple[City, ...]
    people: tuple[Person, ...]

    def documents(self) -> tuple[Document, ...]:
        """Return the encyclopedia of the made-up world."""
        return (*map(_city_article, self.cities), *map(_person_article, self.people))


def _draw_world(generator: np.random.Generator) -> ToolWorld:
    """Draw a world; all its names differ."""
    names = _distinct(generator, _CITIES + _PEOPLE, (_STARTS, _MIDDLES, _ENDS))
    rivers = _distinct(generator, _CITIES, (_STARTS, _MIDDLES, ("a", "ne", "ra", "sk", "th")))
    places = tuple(
        City(
            name,
            int(generator.integers(2_000, 900_000)),
            int(generator.integers(900, 1900)),
            river,
            _one(generator, _WARES),
        )
        for name, river in zip(names[:_CITIES], rivers, strict=True)
    )
    persons = tuple(
        Person(
            f"{_one(generator, _GIVEN)} {name}",
            _one(generator, _TRADES),
            int(generator.integers(1900, 1990)),
            places[int(generator.integers(_CITIES))],
        )
        for name in names[_CITIES:]
    )
    return ToolWorld(places, persons)


def _city_article(city: City) -> Document:
    return Document(
        city.name,
        f"{city.name} is a city on the river {city.river}, founded in {city.founded}. "
        f"It has {city.population} inhabitants and is known for its {city.ware}.",
    )


def _person_article(person: Person) -> Document:
    article = "an" if person.trade[0] in "aeiou" else "a"
    return Document(
        person.name,
        f"{person.name} is {article} {person.trade}, born in {person.birthplace.name} in {person.born}.",
    )


def _distinct(generator: np.random.Generator, count: int, parts: Sequence[Sequence[str]]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(_one(generator, part) for part in parts)] = None
    return list(found)


def _one(generator: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(generator.integers(len(choices)))]


_ITEMS = ("apples", "boxes", "candles", "drums", "envelopes", "flags", "gloves", "hats", "lamps", "maps")
_FIRST_DAY = date(1950, 1, 1)
_DAYS = 40_000


@dataclass(frozen=True, slots=True)
class ToolTask:
    """One task.

    Attributes:
        kind: The generator that made it.
        question: The question to the policy.
        answer: The expected answer.
        plan: Calls that find it out.
        documents: Documents of the search tool.
        stored: Initial content of the store.
        wanted: Required content of the store at the end.
    """

    kind: str
    question: str
    answer: str
    plan: tuple[ToolCall, ...]
    documents: tuple[Document, ...] = ()
    stored: Mapping[str, str] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)


_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")


def answers_agree(said: str, wanted: str) -> bool:
    """Return whether an answer is the wanted one: numbers by value, texts without regard to case and blanks."""
    number, given = _number(wanted), _number(said)
    if number is not None:
        return number == given
    return " ".join(said.split()).strip(" .\"'").casefold() == wanted.casefold()


def _number(text: str) -> Fraction | None:
    plain = text.strip().strip("$").removesuffix(".").replace("−", "-")
    # "1,234" is one number, and "1,2" are two.
    plain = plain.replace(",", "") if _THOUSANDS.fullmatch(plain) else plain
    if len(plain) > 400 or not plain.isascii() or "_" in plain or "e" in plain.lower():
        return None
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


# -- the kinds ---------------------------------------------------------------------------------------------------------


def _sum(generator: np.random.Generator) -> ToolTask:
    first, second, third, fourth = (int(each) for each in generator.integers(100, 10_000, 4))
    divisor = int(generator.integers(2, 10)) ** 2
    expression = f"({first} * {second} - {third}) * {fourth} / {divisor}"
    expression = f"floor({expression})"
    answer = number_text(calculate(expression))
    question = (
        f"Multiply {first} by {second}, subtract {third}, multiply the result by {fourth}, divide it by {divisor} "
        "and round down to a whole number. What is it?"
    )
    return ToolTask("sum", question, answer, (ToolCall("calculator", {"expression": expression}),))


def _weekday(generator: np.random.Generator) -> ToolTask:
    start = _day(generator)
    days = int(generator.integers(20, 5_000))
    end = start + timedelta(days=days)
    plan = (
        ToolCall("date_add", {"date": start.isoformat(), "days": days}),
        ToolCall("weekday", {"date": end.isoformat()}),
    )
    question = f"Which day of the week is it {days} days after {start.isoformat()}?"
    return ToolTask("weekday", question, WEEKDAYS[end.weekday()], plan)


def _days_between(generator: np.random.Generator) -> ToolTask:
    start, end = sorted((_day(generator), _day(generator)))
    call = ToolCall("date_difference", {"start": start.isoformat(), "end": end.isoformat()})
    question = f"How many days after {start.isoformat()} is {end.isoformat()}?"
    return ToolTask("days", question, str((end - start).days), (call,))


def _fact(generator: np.random.Generator) -> ToolTask:
    world = _draw_world(generator)
    city = _city(generator, world)
    asked, answer = (
        (f"How many inhabitants does {city.name} have?", str(city.population)),
        (f"In which year was {city.name} founded?", str(city.founded)),
        (f"On which river does {city.name} lie?", city.river),
        (f"What is {city.name} known for?", city.ware),
    )[int(generator.integers(4))]
    return ToolTask("fact", asked, answer, (_search(city.name),), world.documents())


def _two_facts(generator: np.random.Generator) -> ToolTask:
    world = _draw_world(generator)
    person = world.people[int(generator.integers(len(world.people)))]
    city = person.birthplace
    asked, answer = (
        (f"How many inhabitants does the birthplace of {person.name} have?", str(city.population)),
        (f"In which year was the birthplace of {person.name} founded?", str(city.founded)),
        (f"On which river does the birthplace of {person.name} lie?", city.river),
    )[int(generator.integers(3))]
    return ToolTask("two_facts", asked, answer, (_search(person.name), _search(city.name)), world.documents())


def _compared(generator: np.random.Generator) -> ToolTask:
    world = _draw_world(generator)
    one, other = (world.cities[int(each)] for each in generator.permutation(len(world.cities))[:2])
    expression = f"abs({one.population} - {other.population})"
    plan = (_search(one.name), _search(other.name), ToolCall("calculator", {"expression": expression}))
    question = f"By how much do the numbers of inhabitants of {one.name} and {other.name} differ?"
    return ToolTask(
        "compared", question, str(abs(one.population - other.population)), plan, world.documents()
    )


def _stock(generator: np.random.Generator) -> ToolTask:
    names = [_ITEMS[int(each)] for each in generator.permutation(len(_ITEMS))]
    stored = {name: str(int(generator.integers(10, 2_000))) for name in names[:7]}
    picked = names[: int(generator.integers(3, 6))]
    numbers = [stored[name] for name in picked]
    total = str(sum(map(int, numbers)))
    plan = (
        *(ToolCall("store_get", {"key": name}) for name in picked),
        ToolCall("calculator", {"expression": " + ".join(numbers)}),
        ToolCall("store_set", {"key": "total", "value": total}),
    )
    listed = f"{', '.join(picked[:-1])} and {picked[-1]}"
    question = (
        f"The store holds a number under each of {listed}. Add them up, store the sum under the key total, change "
        "nothing else, and answer with the sum."
    )
    return ToolTask("stock", question, total, plan, (), stored, {**stored, "total": total})


def _noted(generator: np.random.Generator) -> ToolTask:
    world = _draw_world(generator)
    picked = [world.cities[int(each)] for each in generator.permutation(len(world.cities))[:3]]
    wanted = {city.name: str(city.founded) for city in picked}
    stale = picked[int(generator.integers(3))]
    stored = {stale.name: str(stale.founded - 1), "draft": "remove me"}
    oldest = min(picked, key=lambda city: (city.founded, city.name))
    plan = (
        *(_search(city.name) for city in picked),
        *(ToolCall("store_set", {"key": name, "value": year}) for name, year in wanted.items()),
        ToolCall("store_delete", {"key": "draft"}),
    )
    question = (
        f"Store the year in which each of {picked[0].name}, {picked[1].name} and {picked[2].name} was founded under "
        "the name of the city, and nothing but the year. What the store holds of them may be wrong. Remove the key "
        "draft. Answer with the year of the oldest of the three."
    )
    return ToolTask("noted", question, str(oldest.founded), plan, world.documents(), stored, wanted)


def _primes(generator: np.random.Generator) -> ToolTask:
    low = int(generator.integers(100, 20_000))
    high = low + int(generator.integers(200, 2_000))
    code = (
        f"print(sum(n for n in range({low}, {high + 1}) "
        "if n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))))"
    )
    answer = sum(n for n in range(low, high + 1) if all(n % d for d in range(2, int(n**0.5) + 1)))
    question = f"What is the sum of all prime numbers from {low} to {high}?"
    return ToolTask("primes", question, str(answer), (ToolCall("python", {"code": code}),))


def _digits(generator: np.random.Generator) -> ToolTask:
    base, exponent = int(generator.integers(3, 60)), int(generator.integers(50, 300))
    code = f"print(sum(map(int, str({base} ** {exponent}))))"
    question = f"What is the sum of the decimal digits of {base} to the power of {exponent}?"
    answer = sum(map(int, str(base**exponent)))
    return ToolTask("digits", question, str(answer), (ToolCall("python", {"code": code}),))


def _search(name: str) -> ToolCall:
    return ToolCall("search", {"query": name})


def _city(generator: np.random.Generator, world: ToolWorld) -> City:
    return world.cities[int(generator.integers(len(world.cities)))]


def _day(generator: np.random.Generator) -> date:
    return _FIRST_DAY + timedelta(days=int(generator.integers(_DAYS)))


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of task: which groups of tools it needs, and how one is drawn."""

    needs: frozenset[str]
    draw: Callable[[np.random.Generator], ToolTask]


KINDS: Mapping[str, TaskKind] = MappingProxyType(
    {
        "sum": TaskKind(frozenset({"calculator"}), _sum),
        "fact": TaskKind(frozenset({"search"}), _fact),
        "two_facts": TaskKind(frozenset({"search"}), _two_facts),
        "compared": TaskKind(frozenset({"search", "calculator"}), _compared),
        "stock": TaskKind(frozenset({"store", "calculator"}), _stock),
        "noted": TaskKind(frozenset({"search", "store"}), _noted),
        "weekday": TaskKind(frozenset({"dates"}), _weekday),
        "days": TaskKind(frozenset({"dates"}), _days_between),
        "primes": TaskKind(frozenset({"python"}), _primes),
        "digits": TaskKind(frozenset({"python"}), _digits),
    }
)
