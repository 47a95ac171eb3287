"""Curves of a run: as SVG that needs nothing but a style sheet, by pure functions, and as one picture, a PNG."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from rollgym.trainer.core.run_files import read_lines
from rollgym.trainer.records.run_metrics import RUN_METRICS

WIDTH, HEIGHT = 360, 168
_WIDE, _TALL = 1140, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 22
_MOST_POINTS = 240
_TICKS = 5
_MARGIN = 0.06
_NOISE = 1e-9
"""Values whose range is a smaller part of their size than this are one value, but for rounding."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """One curve of a chart.

    Attributes:
        label: Its name.
        points: (step, value), in order of steps.
        band: (low, high) at each point, if the curve has an interval.
        style: "line", "dots" (with a mark at every point), "dashed", or "level" (one value, all the way).
        colour: Number of its colour in the style sheet.
    """

    label: str
    points: Sequence[Point]
    band: Sequence[Point] | None = None
    style: str = "line"
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers to a picture: steps from left to right, values from bottom to top."""

    first: float
    last: float
    low: float
    high: float
    width: int = WIDTH
    height: int = HEIGHT

    def x(self, step: float) -> float:
        """Return the x coordinate of a step, in pixels."""
        span = self.last - self.first or 1.0
        return _LEFT + (self.width - _LEFT - _RIGHT) * (step - self.first) / span

    def y(self, value: float) -> float:
        """Return the y coordinate of a value, in pixels."""
        span = self.high - self.low or 1.0
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * (value - self.low) / span


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Return at most `most` points: means of neighbours, so that a long run stays legible and small."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part))
        for part in parts
    ]


def line_chart(
    lines: Sequence[ChartCurve], *, low: float | None = None, high: float | None = None, wide: bool = False
) -> Markup:
    """Draw curves over training steps.

    Args:
        lines: The curves; those without points are left out.
        low: Bottom of the picture; what the curves need if None.
        high: Top of the picture.
        wide: Draw it as wide as the page.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return Markup("")
    scale = _scale(drawn, low, high, _WIDE if wide else WIDTH, _TALL if wide else HEIGHT)
    parts = [_grid(scale)]
    for line in drawn:
        parts.append(_line(line, scale))
    return _figure(parts, scale, [(line.label, line.colour, line.points) for line in drawn])


def stacked_chart(
    names: Sequence[str],
    steps: Sequence[float],
    parts: Sequence[Sequence[float]],
    colours: Sequence[int] | None = None,
) -> Markup:
    """Draw the parts of a whole over training steps, one on the other.

    Args:
        names: The parts' names, from the bottom.
        steps: Training steps.
        parts: Values of each part, one for each step.
        colours: Number of each part's colour; the first ones in order if None.
    """
    if not steps:
        return Markup("")
    series = [thinned(list(zip(steps, values, strict=True))) for values in parts]
    thinned_steps = [step for step, _ in series[0]]
    tops = [0.0] * len(thinned_steps)
    total = max(sum(values[index][1] for values in series) for index in range(len(thinned_steps)))
    scale = Scale(thinned_steps[0], thinned_steps[-1], 0.0, total or 1.0, _WIDE, _TALL)
    colours = range(len(names)) if colours is None else colours
    shapes = [_grid(scale)]
    for colour, values in zip(colours, series, strict=True):
        bottoms, tops = tops, [top + value for top, (_, value) in zip(tops, values, strict=True)]
        shapes.append(_area(thinned_steps, bottoms, tops, scale, colour))
    shown = list(zip(names, colours, series, strict=True))
    return _figure(shapes, scale, shown)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value that an axis shows.

    An axis of values without a sign does not go below zero, nor does one of negative values go above it. Values that
    are all alike are shown between zero and a little more than they are; zeros between 0 and 1.
    """
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if largest == 0:
        return 0.0, 1.0
    if high - low <= _NOISE * largest:
        return min(0.0, low * 1.25), max(0.0, high * 1.25)
    margin = (high - low) * _MARGIN
    bottom = max(0.0, low - margin) if low >= 0 else low - margin
    top = min(0.0, high + margin) if high <= 0 else high + margin
    return bottom, top


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers between two, at most five or so, with their texts."""
    rough = (high - low) / _TICKS
    size = math.pow(10.0, math.floor(math.log10(rough)))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    largest = max((abs(value) for value in values), default=0.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if largest >= 10_000 or decimals > 4:
        return [(value, short(value)) for value in values]
    return [(value, f"{value:,.{decimals}f}".replace("-", "−")) for value in values]


def short(value: float) -> str:
    """Return a number with three digits that count."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.1e}"
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if size >= limit * 10:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}" if size < 1000 else f"{value:,.0f}"


def _scale(
    lines: Sequence[ChartCurve], low: float | None, high: float | None, width: int, height: int
) -> Scale:
    steps = [step for line in lines for step, _ in line.points if line.style != "level"]
    values = [value for line in lines for _, value in line.points]
    values += [bound for line in lines for pair in line.band or () for bound in pair]
    bottom, top = value_range(values)
    bottom = bottom if low is None else low
    top = top if high is None else high
    if top <= bottom:
        top = bottom + 1.0
    return Scale(min(steps, default=0.0), max(steps, default=1.0), bottom, top, width, height)


def _grid(scale: Scale) -> Markup:
    lines = []
    for value, label in ticks(scale.low, scale.high):
        y = scale.y(value)
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{scale.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    for position, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        step = scale.first + (scale.last - scale.first) * position
        where = f'x="{scale.x(step):.1f}" y="{scale.height - 6}" text-anchor="{anchor}"'
        lines.append(f'<text class="tick" {where}>{step:,.0f}</text>')
    return Markup("".join(lines))


def _line(line: ChartCurve, scale: Scale) -> Markup:
    if line.style == "level":
        y = scale.y(line.points[0][1])
        return Markup(
            f'<line class="curve level c{line.colour}" x1="{_LEFT}" x2="{scale.width - _RIGHT}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    parts = []
    if line.band is not None:
        steps = [step for step, _ in line.points]
        lows, highs = [low for low, _ in line.band], [high for _, high in line.band]
        parts.append(_area(steps, lows, highs, scale, line.colour, kind="band"))
    points = line.points if line.band is not None else thinned(line.points)
    path = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)
    dashed = " dashed" if line.style == "dashed" else ""
    parts.append(Markup(f'<polyline class="curve{dashed} c{line.colour}" points="{path}"/>'))
    if line.style in ("dots", "dashed") or len(points) == 1:
        parts += [
            Markup(
                f'<circle class="dot c{line.colour}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="2.6"/>'
            )
            for step, value in points
        ]
    return Markup("").join(parts)


def _area(
    steps: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    scale: Scale,
    colour: int,
    kind: str = "area",
) -> Markup:
    if len(steps) == 1:
        # One step has no width of its own.
        left, right = scale.width * 0.45, scale.width * 0.55
        corners = [(left, highs[0]), (right, highs[0]), (right, lows[0]), (left, lows[0])]
        path = " ".join(f"{x:.1f},{scale.y(value):.1f}" for x, value in corners)
    else:
        there = zip(steps, highs, strict=True)
        back = zip(reversed(steps), reversed(lows), strict=True)
        path = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in [*there, *back])
    return Markup(f'<polygon class="{kind} c{colour}" points="{path}"/>')


def _figure(
    parts: Sequence[Markup], scale: Scale, shown: Sequence[tuple[str, int, Sequence[Point]]]
) -> Markup:
    """Return the picture with the numbers beside it that the page shows under the pointer."""
    data = {
        "left": _LEFT,
        "right": scale.width - _RIGHT,
        "first": scale.first,
        "last": scale.last,
        "lines": [
            {
                "label": label,
                "colour": colour,
                "points": [[step, float(f"{value:.5g}")] for step, value in thinned(points)],
            }
            for label, colour, points in shown
        ],
    }
    labels = ", ".join(label for label, _, _ in shown)
    return Markup(
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{labels}" data-chart="{data}">{parts}'
        '<line class="pointer" y1="{top}" y2="{bottom}" x1="0" x2="0"/></svg>'
    ).format(
        width=scale.width,
        height=scale.height,
        labels=labels,
        data=escape(json.dumps(data, separators=(",", ":"))),
        parts=Markup("").join(parts),
        top=_TOP,
        bottom=scale.height - _BOTTOM,
    )


_PLOTS = {each.name: each.plot for each in RUN_METRICS if each.plot}
"""What was seen while training: the titles of plots, by the names of their metrics."""
_LEARNT = ("supervised/", "preference/", "reward/", "distill/", "evaluate/held_out/")
"""Begin the names of what runs measure that learn from examples."""
_COUNTS = frozenset({"tokens"})


def plot_run(directory: Path, title: str) -> Path:
    """Draw the curves of the run in `directory` and return the picture's path.

    Every evaluation set is drawn with its 95 % interval, the baselines as dashed lines, and below it what was seen
    while training.
    """
    pyplot = _pyplot()
    rows = read_lines(directory / "metrics.jsonl")
    evaluation_sets = sorted(
        {key.split("/")[1] for row in rows for key in row if key.startswith("evaluate/")}
    )
    figure, axes = pyplot.subplots(1 + (len(_PLOTS) + 1) // 2, 2, figsize=(11, 10), constrained_layout=True)
    figure.suptitle(title)
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    top = figure.add_subplot(grid[0, :])
    _draw_evaluation_sets(top, rows, evaluation_sets)
    for axis, (key, label) in zip(axes[1:].flat, _PLOTS.items(), strict=False):
        points = _points(rows, key)
        axis.plot([step for step, _ in points], [value for _, value in points], linewidth=1.2)
        _set_range(axis, [value for _, value in points])
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
    return _saved(figure, directory)


def plot_curves(directory: Path, title: str) -> Path:
    """Draw what a run that learns from examples measured, loss and all, and return the picture's path."""
    pyplot = _pyplot()
    rows = read_lines(directory / "metrics.jsonl")
    names = sorted({key for row in rows for key in row if key.startswith(_LEARNT) and row[key] is not None})
    held_out = "evaluate/held_out/"
    shown = sorted({name.rpartition("/")[2] for name in names} - _COUNTS)
    figure, axes = pyplot.subplots(
        max(1, (len(shown) + 1) // 2), 2, figsize=(11, 3.4 * max(1, (len(shown) + 1) // 2)), squeeze=False
    )
    figure.set_layout_engine("constrained")
    figure.suptitle(title)
    for axis, label in zip(axes.flat, shown, strict=False):
        for name in names:
            if name.rpartition("/")[2] == label:
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                measured = name.startswith(held_out)
                style = {"marker": "o", "linewidth": 1.8} if measured else {"linewidth": 1.0, "alpha": 0.7}
                text = "held out" if measured else "training batch"
                axis.plot([step for step, _ in points], [value for _, value in points], label=text, **style)
        _set_range(axis, [y for line in axis.get_lines() for y in line.get_ydata()])
        axis.set_title(label.replace("_", " "), fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return _saved(figure, directory)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _saved(figure: Any, directory: Path) -> Path:
    path = directory / "curves.png"
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def _draw_evaluation_sets(axis: Any, rows: Sequence[dict[str, Any]], evaluation_sets: Sequence[str]) -> None:
    for number, evaluation_set in enumerate(evaluation_sets):
        colour = f"C{number}"
        for mode, style in (("sampled", "-o"), ("greedy", ":s")):
            key = f"evaluate/{evaluation_set}/{mode}/success"
            points = [
                (row["step"], row[key], row[key + "_low"], row[key + "_high"]) for row in rows if key in row
            ]
            if points:
                steps, values, lows, highs = zip(*points, strict=True)
                axis.plot(steps, values, style, color=colour, markersize=4, label=f"{evaluation_set}, {mode}")
                axis.fill_between(steps, lows, highs, color=colour, alpha=0.12)
        for baseline, style in (("random", "--"), ("blind", "-.")):
            level = _points(rows, f"evaluate/{evaluation_set}/{baseline}/success")
            if level:
                axis.axhline(
                    level[-1][1],
                    linestyle=style,
                    color=colour,
                    alpha=0.6,
                    label=f"{evaluation_set}, {baseline} baseline",
                )
    axis.set_ylim(0.0, 1.02)
    axis.set_ylabel("success on held-out tasks")
    axis.set_xlabel("training step (0 is after the warm start)")
    axis.grid(alpha=0.3)
    if evaluation_sets:
        axis.legend(fontsize=8, loc="best")


def _set_range(axis: Any, values: Sequence[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        axis.set_ylim(*value_range(finite))


def _points(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    # A number that was not finite is null, such as the entropy of a step whose update was left out.
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
