"""The first process of a run."""

import os

from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.supervisor.entering import enter
from rollgym.sandbox.supervisor.order import Confinement, Order


def test_a_confinement_that_nobody_knows_runs_nothing() -> None:
    misspelt: Confinement = "landlok"  # type: ignore[assignment]
    order = Order(
        confinement=misspelt, stages=(), limits=Limits(), environment={}, directory="/", file_names=()
    )
    first = enter(order, None)
    with first.channel as channel:
        assert channel.recv(1) == b""
    _, status = os.waitpid(first.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
