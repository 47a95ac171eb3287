"""When a queue has been late for too long."""

import pytest

from rollgym.env_server.common.overload import Overload, QueueDelay, overloaded


def test_a_moment_is_worked_off_and_a_queue_that_stays_is_cut() -> None:
    delay = QueueDelay(1.0)
    assert not delay.is_late(0.49, 10.0)
    assert not delay.is_late(3.0, 10.0), "the first that is late may be the last"
    assert not delay.is_late(2.0, 10.49)
    assert delay.is_late(0.5, 10.5)
    assert delay.is_late(0.5, 11.4)


def test_what_is_not_late_ends_a_queue() -> None:
    delay = QueueDelay(1.0)
    assert not delay.is_late(0.6, 10.0)
    assert not delay.is_late(0.1, 10.4)
    assert not delay.is_late(0.6, 10.6)
    assert delay.is_late(0.6, 11.1)


def test_what_comes_long_after_a_queue_is_the_begin_of_another() -> None:
    delay = QueueDelay(1.0)
    assert not delay.is_late(0.6, 10.0)
    assert not delay.is_late(0.6, 100.0)
    assert delay.is_late(0.6, 100.5)


def test_a_few_that_are_late_are_no_queue() -> None:
    overload = Overload(1.0)
    assert not any(overload.is_queue() for _ in range(8))
    assert overload.is_queue()
    assert Overload(1.0).is_queue(9), "they wait behind it"


@pytest.mark.parametrize(("waited_s", "retry_after"), [(0.5, 1), (0.51, 2), (3.0, 6), (1e9, 30)])
def test_whoever_is_refused_is_to_come_when_the_queue_is_gone(waited_s: float, retry_after: int) -> None:
    problem = overloaded(waited_s).to_problem()
    assert (problem["code"], problem["status"], problem["retry_after"]) == ("overloaded", 503, retry_after)
