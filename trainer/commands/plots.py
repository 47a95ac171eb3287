"""The picture of a run: learning curves as a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.core.run_files import read_lines

_TRAIN_CURVES = (
    ("rollout/success", "success, training episodes"),
    ("rollout/reward", "reward per training episode"),
    ("policy/entropy", "entropy per token (nats)"),
    ("rollout/lag_mean", "staleness (versions)"),
)


def plot_run(directory: Path, title: str) -> Path:
    """Draw the curves of the run in `directory` and return the picture's path.

    Every panel of the evaluation is drawn with its 95 % interval, the baselines as dashed lines, and below it what was
    seen while training.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_lines(directory / "metrics.jsonl")
    panels = sorted({key.split("/")[1] for row in rows for key in row if key.startswith("evaluate/")})
    figure, axes = pyplot.subplots(
        1 + (len(_TRAIN_CURVES) + 1) // 2, 2, figsize=(11, 10), constrained_layout=True
    )
    figure.suptitle(title)
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    top = figure.add_subplot(grid[0, :])
    _draw_panels(top, rows, panels)
    for axis, (key, label) in zip(axes[1:].flat, _TRAIN_CURVES, strict=False):
        points = _points(rows, key)
        axis.plot([step for step, _ in points], [value for _, value in points], linewidth=1.2)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
    path = directory / "curves.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_panels(axis: Any, rows: Sequence[dict[str, Any]], panels: Sequence[str]) -> None:
    for number, panel in enumerate(panels):
        colour = f"C{number}"
        for mode, style in (("sampled", "-o"), ("greedy", ":s")):
            key = f"evaluate/{panel}/{mode}/success"
            points = [
                (row["step"], row[key], row[key + "_low"], row[key + "_high"]) for row in rows if key in row
            ]
            if points:
                steps, values, lows, highs = zip(*points, strict=True)
                axis.plot(steps, values, style, color=colour, markersize=4, label=f"{panel}, {mode}")
                axis.fill_between(steps, lows, highs, color=colour, alpha=0.12)
        for baseline, style in (("random", "--"), ("blind", "-.")):
            level = _points(rows, f"evaluate/{panel}/{baseline}/success")
            if level:
                axis.axhline(
                    level[-1][1],
                    linestyle=style,
                    color=colour,
                    alpha=0.6,
                    label=f"{panel}, {baseline} baseline",
                )
    axis.set_ylim(0.0, 1.02)
    axis.set_ylabel("success on held-out tasks")
    axis.set_xlabel("training step (0 is after the warm start)")
    axis.grid(alpha=0.3)
    if panels:
        axis.legend(fontsize=8, loc="best")


def _points(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if key in row]
