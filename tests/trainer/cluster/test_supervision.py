"""Restarts are counted and delayed, and a cluster is left in order, or as it is where it answers no more."""

import asyncio
import pickle
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.backends.transport import RankDiedError
from rollgym.trainer.cluster.supervision import Disconnection, Restarts, RoleRestarts, death_in, part
from rollgym.trainer.core.errors import RoleDiedError, RoleLostError
from rollgym.trainer.core.shutdown import GracefulShutdown, InterruptedRunError


def test_waits_double_up_to_five_minutes():
    restarts = Restarts(9, 5.0)
    assert [restarts.wait_s(0) for _ in range(10)] == [5, 10, 20, 40, 80, 160, 300, 300, 300, None]


def test_a_new_checkpoint_begins_the_count_again():
    restarts = Restarts(2, 1.0)
    assert [restarts.wait_s(saved) for saved in (0, 0, 5, 5, 5)] == [1, 2, 1, 2, None]


def test_without_restarts_the_first_death_ends_the_run():
    assert Restarts(0, 1.0).wait_s(100) is None


@given(st.integers(0, 1000), st.floats(1e-9, 3e7), st.integers(0, 1100))
def test_waits_are_bounded_however_many_there_were(limit, first_s, deaths):
    restarts = Restarts(limit, first_s)
    waits = [restarts.wait_s(3) for _ in range(deaths)]
    assert all(wait is None or 0 < wait <= 300 for wait in waits)
    assert sum(wait is not None for wait in waits) == min(limit, deaths)


def test_each_role_has_a_count_of_its_own_until_it_is_lost():
    restarts = RoleRestarts(1, 2.0, lambda: 0)
    critic = RoleDiedError(
        "critic", "rank 1 of critic on node 10.0.0.3 is gone (exit code 3)", node="10.0.0.3"
    )
    judge = RoleDiedError("Rubric-v0", "its process is gone", killed=True)
    assert (restarts.wait_s(critic), restarts.wait_s(judge)) == (2.0, 2.0)
    with pytest.raises(
        RoleLostError, match=r"critic has died 2 times .*restarts 1\).*10\.0\.0\.3.*last words"
    ) as lost:
        restarts.wait_s(critic)
    assert (lost.value.role, lost.value.node) == ("critic", "10.0.0.3")
    assert death_in(lost.value) is None, "it is not begun again"
    with pytest.raises(RoleLostError, match="more memory"):
        restarts.wait_s(judge)
    with pytest.raises(RoleLostError, match=r"gone; nothing is started again \(cluster\.restarts 0\)"):
        RoleRestarts(0, 2.0, lambda: 0).wait_s(judge)


def test_a_death_is_found_behind_what_it_brought_about():
    died = RoleDiedError("critic", "rank 1 of critic died")
    try:
        try:
            raise died
        except RoleDiedError:
            raise ConnectionError("while cleaning up")  # noqa: B904 - as an exit of a context does
    except ConnectionError as error:
        found = death_in(ExceptionGroup("several", [ValueError("other"), error]))
    assert found is died
    assert death_in(ValueError("alone")) is None
    assert death_in(None) is None


def test_a_death_comes_through_a_pipe_as_itself():
    for error in (
        RoleDiedError("critic", "rank 1 died", killed=True),
        RankDiedError("rank 1 died", 1, "critic", node="n"),
    ):
        died = pickle.loads(pickle.dumps(error))
        assert (type(died), vars(died), str(died)) == (type(error), vars(error), "rank 1 died")


async def test_a_command_goes_on_after_a_death_and_ends_for_a_person():
    shutdown = GracefulShutdown()
    shutdown.say = lambda _: None
    with shutdown.watching():
        for _ in range(2):
            shutdown.end(RoleDiedError("critic", "gone"))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(60)
            assert await shutdown.cancel_shutdown()
            assert asyncio.current_task().cancelling() == 0
        shutdown.end(RoleDiedError("critic", "gone"))
        shutdown.end(InterruptedRunError(signal.SIGINT))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        assert not await shutdown.cancel_shutdown()
        assert isinstance(shutdown.reason, InterruptedRunError)


async def test_a_cancellation_that_comes_late_ends_nothing():
    shutdown = GracefulShutdown()
    with shutdown.watching():
        shutdown.end(
            RoleDiedError("critic", "gone")
        )  # and what is at work fails by itself before it is cancelled
        assert await shutdown.cancel_shutdown()
        await asyncio.sleep(0)


def test_a_cluster_that_answers_is_left_in_order_and_its_errors_are_heard_of():
    assert part(lambda: None, 60.0) is Disconnection.IN_ORDER

    def fails():
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        part(fails, 60.0)


def test_a_cluster_that_answers_no_more_is_left_as_it_is():
    answers, left = threading.Event(), threading.Event()

    def leave():
        answers.wait()
        left.set()

    assert part(leave, 0.0) is Disconnection.UNANSWERED
    (leaving,) = [thread for thread in threading.enumerate() if thread.name == "leaving"]
    assert leaving.daemon, "this process can end meanwhile"
    answers.set()
    assert left.wait(60.0)
