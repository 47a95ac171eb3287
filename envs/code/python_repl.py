"""PythonRepl-v0: an interpreter that keeps its state, files, and a question about data that is too much to read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rollgym.envs.code.answers import read_answers, whole_characters
from rollgym.envs.code.conversation import ProgramSession
from rollgym.envs.code.inside import values
from rollgym.envs.code.sessions import SessionEnv, SessionGoal, same_answer
from rollgym.envs.code.turns import cut
from rollgym.envs.core.splits import Split, split_of_text

_MARGIN_SECONDS = 10.0
_NOTES = {
    "late": "[the time was over; the interpreter was started anew, and all names are gone]",
    "ended": "[the interpreter ended and was started anew, and all names are gone]",
    "flooded": "[the output was too large; the interpreter was started anew, and all names are gone]",
}


class PythonReplEnv(SessionEnv):
    """Python statements run in a sandbox, turn by turn, until the question is answered."""

    metadata: dict[str, Any] = SessionEnv.metadata | {
        "reply": {"language": "python", "answer": True},
        "description": "A Python interpreter that keeps its state, and a question about files.",
        "needs": "a sandbox",
        "baselines": {"random": 0, "constant action": 0, "expert": 1},
    }
    _blocks: ClassVar[tuple[str, ...]] = ("python", "py", "python3")
    _program: ClassVar[str] = "candidate"

    def _draw(self, split: Split | None) -> SessionGoal:
        self._interpreter = self._requests = 0
        return draw_goal(self.np_random, split)

    def _greet(self, session: ProgramSession) -> None:
        setup = {
            "units": [],
            "module": "__main__",
            "apart": False,
            "cpu_seconds": self._seconds * self._limit,
            "wall_seconds": self._seconds,
            # Each turn has its whole time, whatever became of those before it.
            "late": 0,
            "hurried": {},
            "patience": 1 << 30,
            "answer_bytes": values.MAX_CHARACTERS,
        }
        session.tell(setup)

    def _run(self, session: ProgramSession, text: str) -> str:
        self._requests += 1
        do = {"id": self._requests, "child": self._interpreter, "do": {"execute": text}}
        told = session.ask(do, self._seconds + _MARGIN_SECONDS)
        answer = read_answers(json.dumps(told).encode(), self._requests + 1)[self._requests]
        shown = _shown(answer.reply) if answer.status == "answered" else None
        if shown is None:
            # A process that was ended is not asked again.
            self._interpreter += 1
            return _NOTES.get(answer.status, _NOTES["ended"])
        return cut(shown, self._characters) or "[no output]"

    def _judge(self, session: ProgramSession, answer: str) -> bool:
        return same_answer(self._goal.answer, answer)

    def _instruction(self) -> str:
        return (
            "Answer the question. You have a Python interpreter: what stands in a block that begins with ```python is "
            "run, and its output shown; names are kept from turn to turn. When you know the answer, reply with it "
            f"alone, in answer tags: <answer>42</answer>. You have {self._limit} turns."
        )


def _shown(reply: str) -> str | None:
    """Return what the interpreter wrote; None if it wrote no such thing."""
    try:
        told = values.build(values.read_json(reply))
    except values.ValueRefusedError:
        return None
    if not isinstance(told, dict):
        return None
    parts = [told.get("output"), told.get("error")]
    if "output" not in told:
        return None
    return whole_characters("".join(part for part in parts if isinstance(part, str)))


_REGIONS = ("north", "south", "east", "west")
_PRODUCTS = ("lamp", "desk", "chair", "shelf", "clock")
_STATES = ("paid", "open", "returned")
_LEVELS = ("INFO", "WARN", "ERROR")
_PARTS = ("disk", "login", "mail", "search", "report")
_TRIES = 1000


@dataclass(frozen=True, slots=True)
class OrderRow:
    """A row of `orders.csv`."""

    day: int
    region: str
    product: str
    state: str
    units: int
    cents: int


@dataclass(frozen=True, slots=True)
class Event:
    """A line of `events.log`."""

    second: int
    level: str
    part: str
    milliseconds: int


@dataclass(frozen=True, slots=True)
class _Data:
    orders: Sequence[OrderRow]
    events: Sequence[Event]
    region: str
    product: str
    part: str
    bound: int


@dataclass(frozen=True, slots=True)
class _Question:
    """A question with its answer, and the code that finds it."""

    text: str
    answer: Callable[[_Data], str]
    code: str


_READ_ORDERS = """\
import csv
with open("orders.csv") as file:
    orders = list(csv.DictReader(file))
"""
_READ_EVENTS = """\
events = [line.split() for line in open("events.log")]
"""
_QUESTIONS: Sequence[_Question] = (
    _Question(
        "How much, in all, are the paid orders of the region {region} worth (units times price)? Answer with two "
        "decimals.",
        lambda data: _money(sum(o.units * o.cents for o in _paid(data) if o.region == data.region)),
        _READ_ORDERS + "print(round(sum(int(o['units']) * float(o['price']) for o in orders "
        "if o['state'] == 'paid' and o['region'] == '{region}'), 2))",
    ),
    _Question(
        "How many units of the product {product} were ordered, whatever became of the orders?",
        lambda data: str(sum(o.units for o in data.orders if o.product == data.product)),
        _READ_ORDERS + "print(sum(int(o['units']) for o in orders if o['product'] == '{product}'))",
    ),
    _Question(
        "On which day was the most paid for (units times price of paid orders)? The earliest of equally good ones.",
        lambda data: str(_best_day(data)),
        _READ_ORDERS
        + "from collections import Counter\nfrom decimal import Decimal\ndays = Counter()\nfor o in orders:\n"
        "    if o['state'] == 'paid':\n        days[int(o['day'])] += int(o['units']) * Decimal(o['price'])\n"
        "print(min(days, key=lambda day: (-days[day], day)))",
    ),
    _Question(
        "Which share of the orders of the region {region}, in percent with one decimal, was returned?",
        lambda data: f"{_share(data):.1f}",
        _READ_ORDERS + "mine = [o for o in orders if o['region'] == '{region}']\n"
        "print(round(100 * sum(o['state'] == 'returned' for o in mine) / len(mine), 1))",
    ),
    _Question(
        "How many orders have more than {bound} units and a price of at least 50.00?",
        lambda data: str(sum(o.units > data.bound and o.cents >= 5000 for o in data.orders)),
        _READ_ORDERS + "print(sum(int(o['units']) > {bound} and float(o['price']) >= 50 for o in orders))",
    ),
    _Question(
        "How many lines of events.log have the level ERROR and are about {part}?",
        lambda data: str(sum(e.level == "ERROR" and e.part == data.part for e in data.events)),
        _READ_EVENTS + "print(sum(e[1] == 'ERROR' and e[2] == '{part}' for e in events))",
    ),
    _Question(
        "What is the longest time in seconds between two ERROR lines that follow each other in events.log?",
        lambda data: str(_longest_gap(data)),
        _READ_EVENTS + "times = [int(e[0]) for e in events if e[1] == 'ERROR']\n"
        "print(max(b - a for a, b in zip(times, times[1:])))",
    ),
    _Question(
        "What is the median of the milliseconds of the events about {part}? For an even number of events, the mean of "
        "the two in the middle.",
        lambda data: str(float(np.median([e.milliseconds for e in data.events if e.part == data.part]))),
        _READ_EVENTS
        + "import statistics\nprint(float(statistics.median(int(e[3]) for e in events if e[2] == '{part}')))",
    ),
)


def draw_goal(rng: np.random.Generator, split: Split | None) -> SessionGoal:
    """Draw a question of a split with its data.

    Raises:
        ValueError: None was found.
    """
    for _ in range(_TRIES):
        data = _draw_data(rng)
        question = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
        words = {"region": data.region, "product": data.product, "part": data.part, "bound": data.bound}
        files = _files(data)
        text = question.text.format(**words)
        if split is None or split_of_text(f"{text}{files['orders.csv'].decode()[:200]}") == split:
            code = question.code
            for name, word in words.items():
                code = code.replace(f"{{{name}}}", str(word))
            about = (
                "In the working directory lie orders.csv (columns day, region, product, state, units, price) and "
                "events.log (each line: second, level, part, milliseconds)."
            )
            return SessionGoal(f"{about}\n{text}", files, answer=question.answer(data), solution=(code,))
    raise ValueError(f"no question of the split {split} in {_TRIES} tries")


def _draw_data(rng: np.random.Generator) -> _Data:
    def one(names: Sequence[str]) -> str:
        return names[int(rng.integers(len(names)))]

    orders = [
        OrderRow(
            day,
            one(_REGIONS),
            one(_PRODUCTS),
            one(_STATES),
            int(rng.integers(1, 30)),
            int(rng.integers(500, 9900)),
        )
        for day in sorted(int(each) for each in rng.integers(1, 29, 120))
    ]
    events, second = [], 0
    for _ in range(150):
        second += int(rng.integers(1, 90))
        events.append(Event(second, one(_LEVELS), one(_PARTS), int(rng.integers(1, 2000))))
    return _Data(orders, events, one(_REGIONS), one(_PRODUCTS), one(_PARTS), int(rng.integers(5, 25)))


def _files(data: _Data) -> Mapping[str, bytes]:
    rows = [f"{o.day},{o.region},{o.product},{o.state},{o.units},{o.cents / 100:.2f}" for o in data.orders]
    lines = [f"{e.second} {e.level} {e.part} {e.milliseconds}" for e in data.events]
    header = "day,region,product,state,units,price"
    return {
        "orders.csv": ("\n".join([header, *rows]) + "\n").encode(),
        "events.log": ("\n".join(lines) + "\n").encode(),
    }


def _paid(data: _Data) -> list[OrderRow]:
    return [order for order in data.orders if order.state == "paid"]


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def _best_day(data: _Data) -> int:
    days: dict[int, int] = {}
    for order in _paid(data):
        days[order.day] = days.get(order.day, 0) + order.units * order.cents
    return min(days, key=lambda day: (-days[day], day))


def _share(data: _Data) -> float:
    mine = [order for order in data.orders if order.region == data.region]
    return 100 * sum(order.state == "returned" for order in mine) / len(mine)


def _longest_gap(data: _Data) -> int:
    times = [event.second for event in data.events if event.level == "ERROR"]
    return max(later - earlier for earlier, later in pairwise(times))
