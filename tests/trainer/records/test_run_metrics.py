"""The numbers of a run: declared once, whoever shows them."""

import pytest

from rollgym.trainer.core.run_metric import RunMetric, pictures, span_of
from rollgym.trainer.evaluation.reporting.page import _OUTCOMES
from rollgym.trainer.records.run_metrics import RUN_METRICS
from rollgym.trainer.records.trajectory import Phase, TrajectoryOutcome
from tests.support.processes import ROOT
from tests.support.recorded_numbers import declarations_of, is_of


def test_each_is_declared_once():
    names = [metric.name for metric in RUN_METRICS]
    assert len(set(names)) == len(names)


def test_each_is_computed_somewhere():
    table = ROOT / "trainer" / "records" / "run_metrics.py"
    code = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*.py") if path != table)
    phases = {f"{group}/{phase.value}_s" for group in ("time", "episode") for phase in Phase}
    names = {metric.name for metric in RUN_METRICS if "{" not in metric.name} - phases

    def is_written(name: str) -> bool:
        last = name.rpartition("/")[2]
        return any(word in code for word in (f'"{name}"', f'"{last}"', f'/{last}"', f"{last}="))

    assert [name for name in sorted(names) if not is_written(name)] == []


@pytest.mark.parametrize(
    ("metric", "name", "expected"),
    [
        ("outcome/{outcome}", "outcome/solved", True),
        ("outcome/{outcome}", "outcome/", False),
        ("outcome/{outcome}", "outcomes/solved", False),
        ("rollout/success", "rollout/success", True),
        ("rollout/success", "rollout/successes", False),
        ("a.b/{c}", "axb/d", False),
    ],
)
def test_a_kind_of_numbers_has_one_declaration(metric, name, expected):
    assert is_of(name, RunMetric(metric, "")) is expected


@pytest.mark.parametrize("name", ["rollout/successes", "rollouts/success", "time", "nothing/at_all", ""])
def test_what_is_not_recorded_is_not_declared(name):
    assert declarations_of(name) == []


def test_phases_and_outcomes_are():
    assert [name for phase in Phase if not declarations_of(name := f"episode/{phase.value}_s")] == []
    assert [
        name for outcome in TrajectoryOutcome if not declarations_of(name := f"outcome/{outcome.value}")
    ] == []


def test_the_console_shows_them_in_this_order():
    shown = [metric.console.label for metric in RUN_METRICS if metric.console is not None]
    assert shown == [
        *("success", "reward", "loss", "loss", "accuracy", "loss", "accuracy", "loss", "reverse KL"),
        *("entropy", "tokens/s", "staleness", "s/step"),
    ]


def test_the_parts_of_a_step_are_its_first_seven_times():
    parts = [span_of(metric.name) for metric in RUN_METRICS if metric.is_part]
    assert parts == ["generate", "environment", "verify", "wait", "train", "sync", "record"]


def test_pictures_are_of_the_run_or_of_its_learning():
    of_run, of_learning = pictures(RUN_METRICS), pictures(RUN_METRICS, of_learning=True)
    assert of_run["Loss"] == {"loss/policy": "policy", "loss/critic": "critic"}
    assert of_learning["Groups that teach nothing (share)"] == {
        "health/equal_groups": "paid alike",
        "health/alike_groups": "same replies",
    }
    assert of_run.keys().isdisjoint(of_learning)


def test_the_report_has_a_colour_for_each_outcome():
    assert set(_OUTCOMES) == {outcome.value for outcome in TrajectoryOutcome}
    assert len(set(_OUTCOMES.values())) == len(_OUTCOMES)
