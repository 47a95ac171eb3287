"""Generated questions with short answers, for training and for audits without data."""

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.random import Generator

_NAMES = (
    "Ada", "Bruno", "Chiara", "Dimitri", "Elif", "Farid", "Grete", "Hana", "Imani", "Jonas", "Keiko", "Lucia",
    "Mateo", "Nadia", "Olof", "Priya", "Quinn", "Rosa", "Samir", "Tove", "Umar", "Vera", "Wei", "Yusuf",
)  # fmt: skip
_PLACES = ("market", "library", "harbour", "museum", "station", "garden", "theatre", "bakery")
_DAY_COUNT = 3650


def draw(kinds: Sequence[str], generator: Generator) -> tuple[str, str]:
    """Draw a question of one of the kinds and its answer. Those that a guess answers are the rarest."""
    weights = np.array([_WEIGHTS[kind] for kind in kinds])
    kind = kinds[int(generator.choice(len(kinds), p=weights / weights.sum()))]
    return _MAKERS[kind](generator)


def _number(generator: Generator, low: int, high: int) -> int:
    return int(generator.integers(low, high + 1))


def _people(generator: Generator, count: int) -> list[str]:
    return [_NAMES[index] for index in generator.choice(len(_NAMES), count, replace=False).tolist()]


def _date(generator: Generator) -> tuple[str, str]:
    day = datetime.date(2015, 1, 1) + datetime.timedelta(days=_number(generator, 0, _DAY_COUNT))
    days = _number(generator, 5, 200)
    return f"Which date is {days} days after {day.isoformat()}?", (
        day + datetime.timedelta(days=days)
    ).isoformat()


def _speed(generator: Generator) -> tuple[str, str]:
    hours, speed = _number(generator, 2, 9), _number(generator, 8, 120) / 2
    name = _people(generator, 1)[0]
    question = f"{name} rides {hours * speed:g} km in {hours} hours. How many km an hour is that?"
    return question, f"{speed:g}"


def _person(generator: Generator) -> tuple[str, str]:
    people = _people(generator, 4)
    facts = [f"{one} is older than {other}." for one, other in itertools.pairwise(people)]
    order = generator.permutation(len(facts)).tolist()
    oldest = bool(generator.integers(2))
    question = f"Who is the {'oldest' if oldest else 'youngest'}?"
    return " ".join([*(facts[index] for index in order), question]), people[0] if oldest else people[-1]


def _truth(generator: Generator) -> tuple[str, str]:
    person = _people(generator, 1)[0]
    chain = [_PLACES[index] for index in generator.choice(len(_PLACES), 4, replace=False).tolist()]
    rules = [f"Whoever visits the {one} also visits the {other}." for one, other in itertools.pairwise(chain)]
    order = generator.permutation(len(rules)).tolist()
    start, asked = _number(generator, 0, 2), _number(generator, 0, 3)
    question = (
        f"{' '.join(rules[index] for index in order)} {person} visits the {chain[start]}, and nothing else follows. "
        f"True or false: {person} visits the {chain[asked]}."
    )
    return question, "True" if asked >= start else "False"


_MAKERS: Mapping[str, Callable[[Generator], tuple[str, str]]] = {
    "date": _date,
    "number": _speed,
    "person": _person,
    "boolean": _truth,
}
KINDS: tuple[str, ...] = tuple(_MAKERS)
"""The kinds of questions."""
_WEIGHTS: Mapping[str, float] = {"date": 0.3, "number": 0.3, "person": 0.3, "boolean": 0.1}
