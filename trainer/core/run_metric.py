"""A metric of a run: declared once, with its text and its places in console and report."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A place on the console.

    Attributes:
        label: Text before the number.
        form: Format of the number, for `str.format`.
    """

    label: str
    form: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture in the report; those of one title are one picture.

    Attributes:
        title: The picture's.
        label: The line's.
        of_learning: Whether it tells if the run learns, and not how.
    """

    title: str
    label: str
    of_learning: bool = False


@dataclass(frozen=True, slots=True)
class RunMetric:
    """A number of a step.

    Attributes:
        name: Its name, such as "rollout/success"; `{...}` stands for what differs between numbers of one kind, such as
            "outcome/{outcome}".
        help: Its text in the documentation, in Markdown.
        unit: Unit of the number; empty for a share, a mean of values without a unit, or a count of events.
        console: Its place on the console, if it has one.
        curve: Its line in the report, if it has one.
        plot: The title of its plot in `curves.png`; empty if it is not drawn there.
        of_domains: Its heading in the report's table of domains; empty if it is none of them.
        is_part: Whether it is one of the parts that the time of a step is divided into.
    """

    name: str
    help: str
    unit: str = ""
    console: Column | None = None
    curve: Curve | None = None
    plot: str = ""
    of_domains: str = ""
    is_part: bool = False


def number_of_domain(name: str) -> str:
    """Return what a metric is called below `domain/DOMAIN/`, such as `success` for "rollout/success"."""
    return name.removeprefix("rollout/")


def pictures(metrics: Iterable[RunMetric], *, of_learning: bool = False) -> dict[str, dict[str, str]]:
    """Return the pictures of the report: by their titles, the labels of their lines by the names of the metrics."""
    found: dict[str, dict[str, str]] = {}
    for metric in metrics:
        if metric.curve is not None and metric.curve.of_learning is of_learning:
            found.setdefault(metric.curve.title, {})[metric.name] = metric.curve.label
    return found


def span_of(name: str) -> str:
    """Return what a part of a step's time is called, such as `train` for "time/train_s"."""
    return name.removeprefix("time/").removesuffix("_s")
