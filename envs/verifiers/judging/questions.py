"""Questions whose answer can be worded in many ways, with a reference: drawn from a seed."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from numpy.random import Generator

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo")
_MEASURES = (
    ("taller", "shortest", "tallest"),
    ("older", "youngest", "oldest"),
    ("faster", "slowest", "fastest"),
    ("heavier", "lightest", "heaviest"),
)
_HOUR = 60


def _clock(draw: Generator) -> tuple[str, str]:
    start = int(draw.integers(24 * _HOUR))
    hours, minutes = int(draw.integers(1, 9)), int(draw.integers(1, 60))
    end = (start + hours * _HOUR + minutes) % (24 * _HOUR)
    question = (
        f"A train leaves at {start // _HOUR:02}:{start % _HOUR:02} and is under way for {hours} hours and {minutes} "
        "minutes. At what time of day does it arrive?"
    )
    return question, f"{end // _HOUR:02}:{end % _HOUR:02}"


def _weekday(draw: Generator) -> tuple[str, str]:
    today, later = int(draw.integers(7)), int(draw.integers(8, 400))
    question = f"Today is {_DAYS[today]}. What day of the week is it {later} days from now?"
    return question, _DAYS[(today + later) % 7]


def _order(draw: Generator) -> tuple[str, str]:
    names = [_NAMES[int(index)] for index in draw.choice(len(_NAMES), size=4, replace=False)]
    more, least, most = _MEASURES[int(draw.integers(len(_MEASURES)))]
    said = [f"{left} is {more} than {right}." for left, right in pairwise(names)]
    said = [said[int(index)] for index in draw.permutation(len(said))]
    wanted, answer = ((least, names[-1]), (most, names[0]))[int(draw.integers(2))]
    return f"{' '.join(said)} Who is the {wanted}?", answer


def _number(draw: Generator) -> tuple[str, str]:
    left, right = int(draw.integers(12, 100)), int(draw.integers(3, 30))
    return f"How many eggs are in {left} boxes of {right} eggs each? Answer in words.", str(left * right)


_KINDS: Sequence[Callable[[Generator], tuple[str, str]]] = (_clock, _weekday, _order, _number)


def draw_question(draw: Generator) -> dict[str, str]:
    """Draw a `question` with its `reference` answer."""
    question, reference = _KINDS[int(draw.integers(len(_KINDS)))](draw)
    return {"question": question, "reference": reference}
