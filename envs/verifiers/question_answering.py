"""QA-v0: short answers, by exact match, overlap of words, numbers, dates, or true and false.

Without a data set, questions are drawn here, small ones of several kinds.
"""

import datetime
import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args
from unicodedata import normalize

import numpy as np
from numpy.random import Generator
from pydantic import Field

from rollgym.envs.core.kwargs import OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.answers import read_answer, read_reference
from rollgym.envs.verifiers.arguments import is_reference
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict, shortened
from rollgym.envs.verifiers.comparison import QuestionContext, asked_of
from rollgym.envs.verifiers.exact import NotExact, Value, approximate, divide, multiply, rational
from rollgym.envs.verifiers.extraction import marked_answer, numbers_in, without_thoughts
from rollgym.envs.verifiers.latex import plain, unwrapped
from rollgym.envs.verifiers.numerals import exact_number, spelt_number
from rollgym.envs.verifiers.units import contradict, in_kelvin, unit_of

_WEIGHTS: Mapping[str, float] = {"date": 0.3, "number": 0.3, "person": 0.3, "boolean": 0.1}
KINDS: tuple[str, ...] = tuple(_WEIGHTS)
"""The kinds of questions."""

Metric = Literal["auto", "exact", "f1", "contains", "number", "date", "boolean"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_FULL = 1.0 - 1e-9
_SHOWN = 80
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# With it what stands for it in other scripts, and what people write with better keyboards.
_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”„‘’«»‐‑–—…。、「」『』《》")
# Signs that make another thing of the word beside them: Na+, C++, C#, x>5 and 5!, but no "well-known" or "Yahoo!".
_SIGNS = re.compile(
    r"[<>]=?|(?<=\w)\+|(?<=[\w+])\+|(?<=[A-Z])#|(?<=\d)!|(?<![\w\s])-(?=\d)|(?<=\w)-(?![\w-])"
    # What stands between digits, operators between letters, a denial before one, and the brackets of an interval.
    r"|(?<=\d)[.:/](?=\d)|(?<=\w)\s?[*^|=\\]\s?(?=\w)|(?<!\w\w)(?<=\w)/(?=\w(?!\w))"
    r"|(?<!\w)[~!](?=[A-Za-z](?!\w))|\A\s*[(\[{](?=\s*-?\d)|(?<=\d)[)\]}](?=\s*\Z)|[‰@]"
)
_COMMA = re.compile(r",(?=\S)(?!\d{3}(?!\d))")
_ORDINALS = {
    **{"first": "1st", "second": "2nd", "third": "3rd", "fourth": "4th", "fifth": "5th", "sixth": "6th"},
    **{
        "seventh": "7th",
        "eighth": "8th",
        "ninth": "9th",
        "tenth": "10th",
        "eleventh": "11th",
        "twelfth": "12th",
    },
}
_LONGEST_AMOUNT = 200
_WORD, _DIGITS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}"), re.compile(r"\d")
_FACTORIAL = re.compile(r"\s*[$\\(]*\d[\d,]*\s?!+[$\\)]*\s*")
_TRUE, _FALSE = frozenset({"true", "yes", "correct"}), frozenset({"false", "no", "incorrect"})
_BOOLEAN = re.compile(r"\b(not\s+)?(true|false|yes|no|correct|incorrect)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a task wants its answer to be compared."""

    metric: Metric
    tolerance: float
    relative_tolerance: float


class QuestionAnsweringEnv(GeneratingVerifier):
    """Short answers.

    A response is read outside its thoughts: the last box, else the last answer tag, else what follows "the answer is",
    else all of it. A task may name its own `metric` and tolerances, and several `answers` of which any will do.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Short answers: exact match, F1, containment, numbers, dates, true and false.",
        "reward": "1 where the `metric` calls the answer equal, else 0; a share with `f1`.",
        "example_reply": "<answer>{answer}</answer>",
        "baselines": {"random": 0.01, "constant action": 0, "blind": 0.08},
    }

    def __init__(
        self,
        *,
        metric: Annotated[
            Metric,
            OneOf(*METRICS),
            Field(
                description=(
                    "`exact` (equal words, after SQuAD's normalisation), `f1` (overlap of words), "
                    "`contains` (the reference is among the words), `number` (within a tolerance), "
                    "`date`, `boolean`, or `auto` (`date`, `number` or `boolean` where the reference is "
                    "one, else `exact`)."
                )
            ),
        ] = "auto",
        tolerance: Annotated[float, Field(ge=0, description="How far a number may be off.")] = 0.0,
        relative_tolerance: Annotated[
            float, Field(ge=0, description="The same, as a share of the reference.")
        ] = 0.0,
        kinds: Annotated[
            Sequence[str], SomeOf(*KINDS), Field(description="Kinds of generated tasks.")
        ] = KINDS,
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        self._rule = _Rule(metric, tolerance, relative_tolerance)
        self._kinds = tuple(kinds)

    def generate_task(self) -> dict[str, Any]:
        """Draw a question of the wanted kinds."""
        question, answer = _draw_question(self._kinds, self.np_random)
        return {"question": question, "answer": answer}

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task: a `question`, and an `answer` or a list of `answers` of which any will do."""
        if not isinstance(fields.get("question"), str):
            raise ValueError("a task needs the field 'question', as text")
        _read(fields, self._rule)
        return dict(fields)

    def instruction(self) -> str:
        """Return how to answer."""
        return "Answer the question in as few words as possible, between <answer> and </answer>."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Compare what a response gives as its answer; the detail begins with the metric that decided."""
        try:
            references, rule = _read(task, self._rule)
        except ValueError as error:
            return Verdict(0.0, "error", f"bad_task: {error}")
        text = without_thoughts(response)
        found = marked_answer(text)
        said = text.strip() if found is None else found.text
        if not said:
            return Verdict(0.0, "unparsable", "no_answer: the response gives none")
        asked = asked_of(task.get("question"))
        score, metric = max(
            (_compare(reference, said, rule, asked) for reference in references), key=lambda each: each[0]
        )
        shown = shortened(said)
        if score >= _FULL:
            return Verdict(1.0, "correct", f"{metric}: {shown}")
        expected = f"{metric}: {shown}, expected {shortened(references[0])}"
        return Verdict(score, "partial", expected) if score > 0 else Verdict(0.0, "wrong", expected)


def normal(text: str) -> str:
    """Return a text in SQuAD's normal form: small letters, no punctuation, no articles, single spaces.

    Letters and signs that can be written in several ways are compared in one (NFKC).
    """
    return " ".join(
        _ARTICLES.sub(" ", normalize("NFKC", unwrapped(text)).lower().translate(_PUNCTUATION)).split()
    )


def overlap(reference: str, said: str) -> float:
    """Return the F1 of the words of two normal texts."""
    wanted, given = reference.split(), said.split()
    common = sum((Counter(wanted) & Counter(given)).values())
    if not common:
        return float(wanted == given)
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def read_boolean(text: str) -> bool | None:
    """Return what a text says of true and false; None if it says nothing, or both."""
    said = {(match[2].lower() in _TRUE) is (match[1] is None) for match in _BOOLEAN.finditer(text)}
    return said.pop() if len(said) == 1 else None


def number_in(text: str, *, scaled: bool = True) -> Fraction | float | None:
    """Return the number that a text is, or the only one in it; exactly, unless it has roots or pi in it.

    Args:
        text: Such as `1,000 km`.
        scaled: Whether `5 million` is five million, and not 5.
    """
    form = plain(text)
    try:
        value = _value(form.text)
    except NotExact:
        text = unwrapped(text)
        numbers = numbers_in(text)
        if len(numbers) != 1 or numbers[0] == text:
            return None
        if _WORD.search(text) is None and len(_DIGITS.findall(text.replace(numbers[0], "", 1))) > 0:
            return None  # of a formula, no number in it is its value
        return number_in(numbers[0], scaled=scaled)
    exact = rational(value)
    return (form.scale if scaled else 1) * (approximate(value) if exact is None else exact)


def _value(text: str) -> Value:
    if text.endswith("!"):
        raise NotExact("in a sentence, it is no factorial")
    return exact_number(text)


def _compare(reference: str, said: str, rule: _Rule, asked: QuestionContext) -> tuple[float, Metric]:
    metric = rule.metric
    if metric == "auto":
        metric = _kind_of(reference)
    if metric == "date":
        wanted_day, day = read_date(reference), read_date(said)
        return (_exact(reference, said) if day is None else float(wanted_day == day)), metric
    if metric == "number":
        if (measured := _same_quantity(reference, said, rule)) is not None:
            return float(measured), metric
        if _FACTORIAL.fullmatch(said) is not None or _is_of_another(reference, said):
            return 0.0, metric
        # If millions are asked for, or the scale is unknown, "5" answers as "5 million" does.
        ways = (True,) if asked.scale is False else (True, False)
        pairs = [(number_in(reference, scaled=way), number_in(said, scaled=way)) for way in ways]
        if None in pairs[0]:
            # A number that is spelt out is the number.
            spelt = spelt_number(said.strip(" .!"))
            if spelt is not None and pairs[0][0] is not None:
                return float(_is_near(pairs[0][0], Fraction(spelt), rule)), metric
            return _exact(reference, said), metric
        percent = plain(reference).percent, plain(said[:_LONGEST_AMOUNT]).percent
        if percent == (False, True) and asked.percent is False:
            # "5%" for 5 is a hundred times too small where no percentage was asked for.
            pairs = [(wanted, _hundredth(number)) for wanted, number in pairs]
        elif percent == (True, False):
            pairs += [(_hundredth(wanted), number) for wanted, number in pairs]
        return float(any(_is_near(wanted, number, rule) for wanted, number in pairs)), metric
    if metric == "boolean":
        wanted_truth, truth = read_boolean(reference), read_boolean(said)
        return float(wanted_truth == truth), metric
    if metric == "f1":
        wanted_words = normal(reference)
        return overlap(wanted_words, normal(said)) if wanted_words else _exact(reference, said), metric
    if metric == "contains":
        # Between words that there are: a reference of punctuation and articles alone is in everything, or in nothing.
        wanted_words = normal(reference)
        found = f" {wanted_words} " in f" {normal(said)} "
        return float(found) if wanted_words else _exact(reference, said), metric
    return _exact(reference, said), metric


def _hundredth(number: Fraction | float | None) -> Fraction | float | None:
    return None if number is None else number / 100


def _is_of_another(reference: str, said: str) -> bool:
    """Whether a number is said of another unit than the reference's, where neither needs be known."""
    if len(said) > _LONGEST_AMOUNT:
        return False
    wanted, given = plain(reference), plain(said)
    if ("‰" in reference) != ("‰" in said):
        return True
    if wanted.percent and not given.percent and unit_of(given.unit) is not None:
        return True
    return not (wanted.percent or given.percent) and contradict(wanted.unit, given.unit)


def _same_quantity(reference: str, said: str, rule: _Rule) -> bool | None:
    """Whether two amounts of units that are known are equal; None where the units do not differ, or one has none."""
    wanted = read_reference(reference).quantity
    if wanted is None or len(said) > _LONGEST_AMOUNT:
        return None  # and what was said, which may be pages long, is not read as one
    answer = read_answer(said)
    given = answer.quantity
    if given is None:
        measured = answer.value is not None and (
            answer.percent or contradict(read_reference(reference).unit, answer.unit)
        )
        return False if measured else None
    kelvin, other = in_kelvin(wanted.value, wanted.unit), in_kelvin(given.value, given.unit)
    if kelvin is not None and other is not None and wanted.unit != given.unit:
        return _is_near(kelvin, other, rule)
    if wanted.unit == given.unit:
        return (
            None
            if answer.value is not None
            else _is_near(rational(wanted.value), rational(given.value), rule)
        )
    if wanted.unit.dimension != given.unit.dimension:
        return False
    converted = multiply(wanted.value, divide(wanted.unit.factor, given.unit.factor))
    one, other = rational(converted), rational(given.value)
    if one is None or other is None:
        return converted == given.value
    return _is_near(one, other, rule)


def _is_near(wanted: Fraction | float | None, number: Fraction | float | None, rule: _Rule) -> bool:
    if wanted is None or number is None:
        return False
    if isinstance(wanted, Fraction) and isinstance(number, Fraction):
        # As they were written: the float of 0.3 is less than that.
        slack = max(Fraction(repr(rule.tolerance)), Fraction(repr(rule.relative_tolerance)) * abs(wanted))
        if wanted.denominator > 1 or number.denominator > 1:
            # As exact as decimals are written; whole numbers are, to their last digit.
            slack = max(slack, Fraction(1, 10**9) * max(abs(wanted), abs(number)))
        return abs(number - wanted) <= slack
    one, other = _as_float(wanted), _as_float(number)
    most = max(rule.tolerance, rule.relative_tolerance * abs(one))
    return math.isclose(other, one, rel_tol=1e-9, abs_tol=most)


def _as_float(number: Fraction | float) -> float:
    """Return a number as a float; what is too large for one becomes NaN, which is near to no number."""
    try:
        value = float(number)
    except OverflowError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _exact(reference: str, said: str) -> float:
    wanted, given = (normal(_COMMA.sub(", ", each)) for each in (reference, said))
    if not wanted:
        # What is nothing but punctuation and articles is compared as it stands.
        return float(said.strip() == reference.strip())
    if given == wanted:
        return float(_signs(reference) == _signs(said))
    return float(_in_digits(said, given) == _in_digits(reference, wanted))


def _signs(text: str) -> list[str]:
    return [each.strip() for each in _SIGNS.findall(_COMMA.sub(", ", text).strip(" ."))]


def _in_digits(text: str, words: str) -> str:
    """Return a number that is spelt out in digits, and of what is none its words."""
    spelt = spelt_number(text.strip(" .!"))
    return _ORDINALS.get(words, words) if spelt is None else str(spelt)


def _kind_of(reference: str) -> Metric:
    if reference.strip().lower() in ("true", "false", "yes", "no"):
        return "boolean"
    if read_date(reference) is not None:
        return "date"
    try:
        _value(plain(reference).text)
    except NotExact:
        # "5 m" is a number for its unit, and "x" is none.
        return "exact" if read_reference(reference).quantity is None else "number"
    return "number"


def _read(task: Mapping[str, Any], default: _Rule) -> tuple[list[str], _Rule]:
    """Return the references of a task and how it wants them to be compared.

    Raises:
        ValueError: It has none, or they cannot be compared so.
    """
    references, rule = _references(task), _rule(task, default)
    for each in references:
        if not _is_one(rule.metric, each):
            raise ValueError(
                f"with the metric {rule.metric} an answer must be a {rule.metric}, which {each[:_SHOWN]!r} is not"
            )
    return references, rule


def _is_one(metric: Metric, reference: str) -> bool:
    """Whether a reference is what a metric compares; words are compared by all but three."""
    if metric == "date":
        return read_date(reference) is not None
    if metric == "number":
        number = number_in(reference)
        return isinstance(number, Fraction) or (number is not None and math.isfinite(number))
    return metric != "boolean" or read_boolean(reference) is not None


def _references(task: Mapping[str, Any]) -> list[str]:
    given = task.get("answers", task.get("answer"))
    answers = list(given) if isinstance(given, (list, tuple)) else [given]
    if not answers or not all(map(is_reference, answers)):
        raise ValueError(
            "a task needs the field 'answer' (text, a number, true or false) or a list of them, 'answers'"
        )
    return [str(each) for each in answers]


def _rule(task: Mapping[str, Any], default: _Rule) -> _Rule:
    metric = task.get("metric", default.metric)
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}")
    slack = [
        task.get("tolerance", default.tolerance),
        task.get("relative_tolerance", default.relative_tolerance),
    ]
    for value in slack:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"a tolerance must be a number that is not negative, not {value!r}")
    return _Rule(metric, float(slack[0]), float(slack[1]))


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAME = r"(?P<month>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_WEEKDAY = r"(?:(?:mon|tues?|wednes|wed|thurs?|fri|satur|sat|sun)(?:day)?,?\s+)?(?:the\s+)?"
_FORMS = tuple(
    re.compile(_WEEKDAY + form, re.IGNORECASE)
    for form in (
        rf"{_YEAR}[-/.](?P<number>\d{{1,2}})[-/.]{_DAY}(?:t00:00:00(?:\.0+)?z?)?",
        rf"{_NAME}\s+{_DAY},?\s+{_YEAR}",
        rf"{_DAY}\s+(?:of\s+)?{_NAME},?\s+{_YEAR}",
        rf"{_YEAR},?\s+{_NAME}\s+{_DAY}",
        rf"{_DAY}\.\s?(?P<number>\d{{1,2}})\.\s?{_YEAR}",
    )
)
_SLASHES = re.compile(rf"(\d{{1,2}})[/-](\d{{1,2}})[/-]{_YEAR}")
_MONTHS_IN_A_YEAR = 12


def read_date(text: str) -> datetime.date | None:
    """Return the day that a text names; None if it names none, or could name two ("03/04/2024")."""
    plain = " ".join(text.split()).strip(" .*_")
    for form in _FORMS:
        match = form.fullmatch(plain)
        if match is not None:
            groups = match.groupdict()
            name = groups.get("month")
            month = _MONTHS.index(name.lower()) + 1 if name else int(groups["number"])
            return _date(int(groups["year"]), month, int(groups["day"]))
    match = _SLASHES.fullmatch(plain)
    if match is None:
        return None
    first, second, year = int(match[1]), int(match[2]), int(match["year"])
    if first == second or second > _MONTHS_IN_A_YEAR:
        return _date(year, first, second)
    return _date(year, second, first) if first > _MONTHS_IN_A_YEAR else None


def _date(year: int, month: int, day: int) -> datetime.date | None:
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None


_NAMES = (
    "Ada", "Bruno", "Chiara", "Dimitri", "Elif", "Farid", "Grete", "Hana", "Imani", "Jonas", "Keiko", "Lucia",
    "Mateo", "Nadia", "Olof", "Priya", "Quinn", "Rosa", "Samir", "Tove", "Umar", "Vera", "Wei", "Yusuf",
)  # fmt: skip
_PLACES = ("market", "library", "harbour", "museum", "station", "garden", "theatre", "bakery")
_DAY_COUNT = 3650


def _draw_question(kinds: Sequence[str], generator: Generator) -> tuple[str, str]:
    """Draw a question of one of the kinds and its answer. Those that a guess answers are the rarest."""
    weights = np.array([_WEIGHTS[kind] for kind in kinds])
    kind = kinds[int(generator.choice(len(kinds), p=weights / weights.sum()))]
    return _MAKERS[kind](generator)


def _number(generator: Generator, low: int, high: int) -> int:
    return int(generator.integers(low, high + 1))


def _people(generator: Generator, count: int) -> list[str]:
    return [_NAMES[index] for index in generator.choice(len(_NAMES), count, replace=False).tolist()]


def _date_asked(generator: Generator) -> tuple[str, str]:
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
    "date": _date_asked,
    "number": _speed,
    "person": _person,
    "boolean": _truth,
}
