"""The picture of a run: learning curves as a PNG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.trainer.core.run_files import read_lines
from rollgym.trainer.evaluation.reporting.charts import value_range

_TRAIN_CURVES = (
    ("rollout/success", "success, training episodes"),
    ("rollout/reward", "reward per training episode"),
    ("policy/entropy", "entropy per token (nats)"),
    ("rollout/lag_mean", "staleness (versions)"),
)
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
    figure, axes = pyplot.subplots(
        1 + (len(_TRAIN_CURVES) + 1) // 2, 2, figsize=(11, 10), constrained_layout=True
    )
    figure.suptitle(title)
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    top = figure.add_subplot(grid[0, :])
    _draw_evaluation_sets(top, rows, evaluation_sets)
    for axis, (key, label) in zip(axes[1:].flat, _TRAIN_CURVES, strict=False):
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
    return [(row["step"], row[key]) for row in rows if key in row]
