"""A cluster is left in order, or as it is where it answers no more."""

import threading

import pytest

from rollgym.trainer.cluster.parting import Parting, part


def test_a_cluster_that_answers_is_left_in_order_and_its_errors_are_heard_of():
    assert part(lambda: None, 60.0) is Parting.IN_ORDER

    def fails():
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        part(fails, 60.0)


def test_a_cluster_that_answers_no_more_is_left_as_it_is():
    answers, left = threading.Event(), threading.Event()

    def leave():
        answers.wait()
        left.set()

    assert part(leave, 0.0) is Parting.UNANSWERED
    (leaving,) = [thread for thread in threading.enumerate() if thread.name == "leaving"]
    assert leaving.daemon, "this process can end meanwhile"
    answers.set()
    assert left.wait(60.0)
