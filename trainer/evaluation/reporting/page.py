"""The page of a run: one HTML file that needs no network, made from what the run's directory says."""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rollgym.clients.measuring.statistics import Interval, rate_difference
from rollgym.clients.protocol.yaml_text import write_yaml
from rollgym.trainer.core.run_metric import number_of_domain, pictures, span_of
from rollgym.trainer.evaluation.reporting.charts import ChartCurve, Point, line_chart, short, stacked_chart
from rollgym.trainer.evaluation.reporting.episodes import episode_views, token_text
from rollgym.trainer.evaluation.reporting.run_folder import Row, RunFolder, number
from rollgym.trainer.records.run_metrics import RUN_METRICS
from rollgym.trainer.records.trajectory import Phase


def findings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what is to be said of the steps of a run: (what, how much)."""
    found: list[tuple[str, str]] = []
    updates = [value for row in rows if (value := number(row, "policy/optimizer_steps")) is not None]
    played = [row for row in rows if number(row, "rollout/groups_kept") is not None]
    if played:
        idle = sum(not number(row, "policy/optimizer_steps") for row in played)
        found.append(("steps without an optimizer step", f"{idle:,} of {len(played):,}"))
    if updates:
        left_out = sum(
            number(row, f"{model}/skipped_steps") or 0.0 for row in rows for model in ("policy", "critic")
        )
        found.append(("optimizer steps left out, not finite", f"{left_out:,.0f}"))
    longest = [value for row in rows if (value := number(row, "health/steps_without_learning")) is not None]
    if longest:
        found.append(("most steps in a row without learning", f"{max(longest):,.0f}"))
        found.append(("of these, up to the last step", f"{longest[-1]:,.0f}"))
    entropies = [value for row in rows if (value := number(row, "policy/entropy")) is not None]
    if entropies:
        found.append(
            ("entropy at first and at last (nats)", f"{short(entropies[0])}, {short(entropies[-1])}")
        )
    return found


_MOST_OTHERS = 60
_MOST_EVALUATION_SETS = 12
_MOST_DOMAINS = 40
_RECENT = 10
_LONGEST_SETTINGS = 60_000

_PARTS = tuple(metric for metric in RUN_METRICS if metric.is_part)
"""The parts of a step's time."""

_OUTSIDE = "time/outside_s"
_PLACED = frozenset(metric.name for metric in RUN_METRICS if metric.curve is not None)
_OUTCOMES = {
    "solved": 2,
    "failed": 5,
    "truncated": 1,
    "context_overflow": 4,
    "timeout": 3,
    "environment_error": 7,
    "invalid_number": 6,
    "agent_error": 0,
    "unplayable": 8,
}
"""Outcomes, each with its colour."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its title."""

    title: str
    chart: Markup


@dataclass(frozen=True, slots=True)
class EvaluationSetRow:
    """The results of an evaluation set in one mode of play."""

    evaluation_set: str
    mode: str
    first: str
    last: str
    gain: str
    episodes: str


def render_page(run: RunFolder, *, live: bool = False, now: float | None = None) -> str:
    """Return the page.

    Args:
        run: The data of the run.
        live: Whether the page asks the server that it came from for what is new.
        now: The time in seconds since 1970; the machine's if None.
    """
    now = time.time() if now is None else now
    views = episode_views(run.episodes, token_text(run.directory))
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=str(run.settings.get("name") or run.directory.resolve().name),
            directory=str(run.directory),
            state=_state(run, now),
            running=run.state == "running",
            live=live,
            made=time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
            style=Markup(_asset("page.css")),
            script=Markup(script),
            script_digest=digest,
            cards=_cards(run),
            notes=run.notes,
            evaluation_sets=_evaluation_set_figures(run.evaluations),
            evaluation_set_rows=_evaluation_set_rows(run.evaluations),
            figures=_figures(run.training),
            health_figures=_figures(run.training, of_learning=True),
            health_rows=findings(run.training),
            others=_others(run.training),
            time_figure=_time_figure(run.training),
            time_rows=_time_rows(run),
            outcomes=_outcomes(run.training),
            domains=_domains(run.training),
            domain_figure=_domain_figure(run.training),
            tasks=[
                (name.replace("dropped/", "dropped: "), f"{count:,}") for name, count in run.tasks.items()
            ],
            episodes=views,
            episode_outcomes=sorted({view.outcome for view in views}),
            episode_phases=[
                phase.value
                for phase in Phase
                if any(phase.value == name for view in views for name, *_ in view.phases)
            ],
            settings=write_yaml(run.settings)[:_LONGEST_SETTINGS] if run.settings else "",
        )
    )


def points(rows: Sequence[Row], name: str) -> list[Point]:
    """Return the steps at which a number was recorded, with it."""
    found = ((row["step"], number(row, name)) for row in rows)
    return [(step, value) for step, value in found if value is not None]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    return environment


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _state(run: RunFolder, now: float) -> str:
    if run.changed is None:
        return run.state
    quiet = duration(max(0.0, now - run.changed))
    said = {"running": f"running, wrote {quiet} ago", "stopped": f"stopped {quiet} ago"}
    return said.get(run.state, f"finished {quiet} ago")


def duration(seconds: float) -> str:
    """Return a time in the unit that people would say it in."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _cards(run: RunFolder) -> list[tuple[str, str, str]]:
    """The numbers at the top: (name, value, a word on it)."""
    cards: list[tuple[str, str, str]] = []
    steps = run.settings.get("steps")
    if run.training:
        last = run.training[-1]
        cards.append(("step", f"{last['step']:,}", f"of {steps:,}" if isinstance(steps, int) else ""))
        if (success := number(last, "rollout/success")) is not None:
            cards.append(("success", f"{success:.3f}", "in the last step's episodes"))
    for row in _evaluation_set_rows(run.evaluations)[:1]:
        cards.append(
            (
                f"{row.evaluation_set}, {row.mode}",
                row.last.split(" ")[0],
                f"{row.last.partition(' ')[2]}, at first {row.first.split(' ')[0]}",
            )
        )
    if seconds := run.sums.get("time/step_s", 0.0) + run.sums.get("time/outside_s", 0.0):
        cards.append(("time", duration(seconds), f"{seconds / run.steps:.2f} s a step"))
        tokens = run.sums.get("tokens", 0.0)
        cards.append(("tokens sampled", short(tokens), f"{tokens / seconds:,.0f} a second"))
    if peaks := points(run.training, "memory/rss_peak_gib"):
        cards.append(("memory", f"{max(value for _, value in peaks):.2f} GiB", "most that the process had"))
    return cards


def _evaluation_set_names(rows: Sequence[Row]) -> list[str]:
    names = {
        name.split("/")[1]
        for row in rows
        for name in row
        if name.startswith("evaluate/") and name.count("/") >= 3
    }
    return sorted(names)[:_MOST_EVALUATION_SETS]


def _evaluation_set_figures(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(name, chart)
        for name in _evaluation_set_names(rows)
        if (chart := _evaluation_set_chart(rows, name))
    ]


def _evaluation_set_chart(rows: Sequence[Row], evaluation_set: str) -> Markup:
    lines = []
    for colour, (mode, style) in enumerate((("sampled", "dots"), ("greedy", "dashed"))):
        key = f"evaluate/{evaluation_set}/{mode}/success"
        measured = [row for row in rows if number(row, key) is not None]
        band = [(number(row, f"{key}_low") or 0.0, number(row, f"{key}_high") or 0.0) for row in measured]
        lines.append(ChartCurve(mode, points(measured, key), band, style, colour))
    for colour, mode in ((3, "random"), (4, "blind")):
        if level := points(rows, f"evaluate/{evaluation_set}/{mode}/success"):
            lines.append(ChartCurve(f"{mode} baseline", level[-1:], None, "level", colour))
    return line_chart(lines, low=0.0, high=1.0, wide=True)


def _evaluation_set_rows(rows: Sequence[Row]) -> list[EvaluationSetRow]:
    found = []
    for evaluation_set in _evaluation_set_names(rows):
        for mode in ("sampled", "greedy", "random", "blind"):
            key = f"evaluate/{evaluation_set}/{mode}"
            measured = [row for row in rows if number(row, f"{key}/success") is not None]
            if not measured:
                continue
            first, last = _interval(measured[0], key), _interval(measured[-1], key)
            gain = "" if len(measured) == 1 else str(rate_difference(first, last))
            episodes = number(measured[-1], f"{key}/episodes")
            found.append(
                EvaluationSetRow(
                    evaluation_set,
                    mode,
                    str(first),
                    str(last),
                    gain,
                    "" if episodes is None else f"{episodes:,.0f}",
                )
            )
    return found


def _interval(row: Row, key: str) -> Interval:
    value = number(row, f"{key}/success") or 0.0
    low, high = number(row, f"{key}/success_low"), number(row, f"{key}/success_high")
    return Interval(value, value if low is None else low, value if high is None else high)


def _figures(rows: Sequence[Row], *, of_learning: bool = False) -> list[Figure]:
    figures = []
    for title, drawn in pictures(RUN_METRICS, of_learning=of_learning).items():
        lines = [
            ChartCurve(label, points(rows, name), colour=colour)
            for colour, (name, label) in enumerate(drawn.items())
        ]
        if chart := line_chart(lines):
            figures.append(Figure(title, chart))
    return figures


def _others(rows: Sequence[Row]) -> list[Figure]:
    """All numbers that have no place of their own on the page."""
    names = sorted(
        {
            name
            for row in rows
            for name in row
            if name != "step"
            and name not in _PLACED
            and not name.startswith(("domain/", "time/", "outcome/"))
        }
    )
    figures = [
        Figure(name, line_chart([ChartCurve(name, points(rows, name))])) for name in names[:_MOST_OTHERS]
    ]
    return [figure for figure in figures if figure.chart]


def _time_figure(rows: Sequence[Row]) -> Markup:
    names = [part.name for part in _PARTS]
    timed = [row for row in rows if all(number(row, name) is not None for name in names)]
    values = [[max(0.0, number(row, name) or 0.0) for row in timed] for name in names]
    return stacked_chart(list(map(span_of, names)), [float(row["step"]) for row in timed], values)


def _time_rows(run: RunFolder) -> list[tuple[str, str, float]]:
    """Return the parts of the whole run's time: (part, seconds, share)."""
    names = (*(part.name for part in _PARTS), _OUTSIDE)
    spent = {span_of(name): run.sums.get(name, 0.0) for name in names}
    whole = sum(spent.values())
    return [
        (part, duration(seconds) if seconds >= 120 else f"{seconds:.1f} s", seconds / whole)
        for part, seconds in spent.items()
        if whole > 0
    ]


def _outcomes(rows: Sequence[Row]) -> Markup:
    told = [row for row in rows if number(row, "outcome/solved") is not None]
    values = [[number(row, f"outcome/{name}") or 0.0 for row in told] for name in _OUTCOMES]
    names = [name.replace("_", " ") for name in _OUTCOMES]
    return stacked_chart(names, [float(row["step"]) for row in told], values, list(_OUTCOMES.values()))


def _domain_names(rows: Sequence[Row]) -> list[str]:
    ends = "/outcome/solved"
    names = {
        name[len("domain/") : -len(ends)]
        for row in rows
        for name in row
        if name.startswith("domain/") and name.endswith(ends)
    }
    return sorted(names)[:_MOST_DOMAINS]


_OF_DOMAINS = {number_of_domain(each.name): each.of_domains for each in RUN_METRICS if each.of_domains}
"""The headings of the table of domains, by the names of its numbers."""


def _domains(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Means of each domain over the last steps."""
    recent = rows[-_RECENT:]
    table = []
    for domain in _domain_names(rows):
        cells = []
        for name in _OF_DOMAINS:
            values = [value for _, value in points(recent, f"domain/{domain}/{name}")]
            cells.append(short(sum(values) / len(values)) if values else "")
        table.append((domain, cells))
    if not table:
        return None
    return {"columns": list(_OF_DOMAINS.values()), "rows": table, "steps": len(recent)}


def _domain_figure(rows: Sequence[Row]) -> Markup:
    names = _domain_names(rows)
    if len(names) < 2:
        return Markup("")
    lines = [
        ChartCurve(name, points(rows, f"domain/{name}/success"), colour=index % 8)
        for index, name in enumerate(names[:8])
    ]
    return line_chart(lines, low=0.0, high=1.0, wide=True)
