"""What a run may use: bounds that make no sense are told before anything is started."""

import math
from typing import Any

import pytest

from rollgym.sandbox.command import main
from rollgym.sandbox.core.limits import LONGEST_SECONDS, Limits


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"memory_mb": 0}, "memory_mb must be above zero"),
        ({"wall_seconds": math.nan}, "wall_seconds must be above zero"),
        ({"wall_seconds": math.inf}, "wall_seconds must be at most"),
        ({"cpu_seconds": 1e300}, "cpu_seconds must be at most"),
        ({"compile_seconds": LONGEST_SECONDS + 1.0}, "compile_seconds must be at most"),
    ],
)
def test_a_limit_has_bounds_of_its_own(limit: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limit)


def test_who_asks_for_a_run_without_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--lang", "python", "--timeout", "inf", "program.py"]) == 2
    assert "wall_seconds must be at most" in capsys.readouterr().err
