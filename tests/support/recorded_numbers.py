"""What a run has recorded of its steps, held against what is declared."""

import json
import re
from pathlib import Path

from rollgym.trainer.core.run_metric import RunMetric
from rollgym.trainer.records.run_metrics import RUN_METRICS

_OF_EVERY_LINE = frozenset({"step"})
_PLACE = re.compile(r"\{\w+\}")


def is_of(name: str, metric: RunMetric) -> bool:
    """Whether a number that was recorded is this one, or one of this kind."""
    return re.fullmatch(".+".join(map(re.escape, _PLACE.split(metric.name))), name) is not None


def declarations_of(name: str) -> list[str]:
    """The names of the metrics that a number may be of."""
    return [metric.name for metric in RUN_METRICS if is_of(name, metric)]


def undeclared_numbers(run: Path) -> set[str]:
    """The names of a run's metrics that nothing declares."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        names = {name for line in lines for name in json.loads(line)} - _OF_EVERY_LINE
    assert names, "the run has recorded nothing"
    return {name for name in names if not declarations_of(name)}
