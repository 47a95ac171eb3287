"""A small made-up world: cities and people with facts, each with an article. Nothing of it can be known beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.envs.tools.search import Document

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
class World:
    """Cities, people, and an article on each."""

    cities: tuple[City, ...]
    people: tuple[Person, ...]

    def documents(self) -> tuple[Document, ...]:
        """Return the encyclopedia of the made-up world."""
        return (*map(_city_article, self.cities), *map(_person_article, self.people))


def draw_world(generator: np.random.Generator, cities: int = 10, people: int = 8) -> World:
    """Draw a world; all its names differ."""
    names = _distinct(generator, cities + people, (_STARTS, _MIDDLES, _ENDS))
    rivers = _distinct(generator, cities, (_STARTS, _MIDDLES, ("a", "ne", "ra", "sk", "th")))
    places = tuple(
        City(
            name,
            int(generator.integers(2_000, 900_000)),
            int(generator.integers(900, 1900)),
            river,
            _one(generator, _WARES),
        )
        for name, river in zip(names[:cities], rivers, strict=True)
    )
    persons = tuple(
        Person(
            f"{_one(generator, _GIVEN)} {name}",
            _one(generator, _TRADES),
            int(generator.integers(1900, 1990)),
            places[int(generator.integers(cities))],
        )
        for name in names[cities:]
    )
    return World(places, persons)


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
