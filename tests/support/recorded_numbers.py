"""What a run has recorded of its steps, held against what is declared."""

import json
from pathlib import Path

from rollgym.trainer.records.run_metrics import RUN_METRICS

_OF_EVERY_LINE = frozenset({"step"})


def undeclared_numbers(run: Path) -> set[str]:
    """The names of a run's metrics that nothing declares."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        names = {name for line in lines for name in json.loads(line)} - _OF_EVERY_LINE
    assert names, "the run has recorded nothing"
    return {name for name in names if not any(metric.is_of(name) for metric in RUN_METRICS)}
