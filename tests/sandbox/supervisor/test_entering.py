"""The first process of a run."""

import pytest

from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.supervisor.entering import enter
from rollgym.sandbox.supervisor.order import ConfinementName, Order


def test_a_confinement_that_nobody_knows_runs_nothing() -> None:
    misspelt: ConfinementName = "landlok"  # type: ignore[assignment]
    order = Order(
        confinement=misspelt, stages=(), limits=Limits(), environment={}, directory="/", file_names=()
    )
    with pytest.raises(KeyError, match="landlok"):
        enter(order, None)
