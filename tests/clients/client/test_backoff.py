"""How long a client waits before it asks again what a server has put off."""

import random

import pytest

from rollgym.clients.net.pool import Backoff
from rollgym.clients.protocol.errors import ProblemError


def test_whoever_is_refused_for_overload_comes_at_another_time_than_the_others() -> None:
    backoff = Backoff(random.Random(0))
    delays = [backoff.delay_after(ProblemError("overloaded", "", retry_after=4), 0) for _ in range(1000)]
    assert min(delays) >= 4
    assert max(delays) <= 6
    assert max(delays) - min(delays) > 1.9


def test_whoever_is_refused_again_comes_later_up_to_a_bound() -> None:
    backoff = Backoff(random.Random(0))
    problem = ProblemError("overloaded", "", retry_after=1)
    for attempt in range(8):
        delay = backoff.delay_after(problem, attempt)
        assert 1.5**attempt <= delay <= 1.5 ** (attempt + 1)
    assert [backoff.delay_after(problem, attempt) for attempt in (20, 10**9)] == [60.0, 60.0]


@pytest.mark.parametrize("asked", [1e308, 10**400])
def test_a_server_cannot_ask_for_more_than_the_bound(asked: float) -> None:
    problem = ProblemError.from_problem({"code": "overloaded", "retry_after": asked})
    assert Backoff(random.Random(0)).delay_after(problem, 3) <= 60


@pytest.mark.parametrize("asked", ["4", True, -1, float("nan"), None])
def test_what_is_no_time_is_not_waited_for(asked: object) -> None:
    problem = ProblemError.from_problem({"code": "overloaded", "retry_after": asked})
    assert Backoff(random.Random(0)).delay_after(problem, 0) <= 0.05
