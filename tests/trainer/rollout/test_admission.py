"""The staleness bound, no starvation, and oldest-first order, under a simulated clock."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.rollout.admission import AdmissionWindow


def simulate(window: AdmissionWindow, steps: int, duration_of, train_duration: float = 1.0):
    """Play `steps` training steps on a simulated clock.

    Returns (index, lag) of every trained group in the order of training, and the largest number of untrained groups.
    """
    clock, version = 0.0, 0
    running: list[tuple[float, int]] = []
    trained, peak = [], 0

    def admit():
        for index in window.admit(version):
            heapq.heappush(running, (clock + duration_of(index), index))

    for _ in range(steps):
        taken = []
        admit()
        while len(taken) < window.groups_per_step:
            peak = max(peak, len(window.untrained))
            index = window.take(version)
            if index is None:
                clock, finished = heapq.heappop(running)
                window.finish(finished)
                continue
            taken.append(index)
        clock += train_duration
        # Episodes go on while the step trains.
        while running and running[0][0] <= clock:
            window.finish(heapq.heappop(running)[1])
        for index in taken:
            trained.append((index, version - window.admitted_version(index)))
            window.release(index)
        version += 1
    return trained, peak


@settings(max_examples=150, deadline=None)
@given(
    groups=st.integers(1, 6),
    staleness=st.integers(0, 4),
    fraction=st.floats(0.0, 1.0),
    durations=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=40),
)
def test_lag_is_bounded_and_no_group_starves(groups, staleness, fraction, durations):
    window = AdmissionWindow(groups, staleness, fraction)
    trained, peak = simulate(window, steps=25, duration_of=lambda index: durations[index % len(durations)])
    assert max(lag for _, lag in trained) <= staleness
    assert peak <= window.budget
    indices = [index for index, _ in trained]
    assert len(set(indices)) == len(indices)
    # Every admitted group is trained or still within the budget: none was thrown away.
    assert sorted([*indices, *window.untrained]) == list(range(window.next_index))


@given(groups=st.integers(1, 5), slow=st.integers(0, 4))
def test_one_slow_group_is_overtaken_by_less_than_a_window(groups, slow):
    window = AdmissionWindow(groups, max_staleness=2, window_fraction=0.5)
    trained, _ = simulate(window, 20, lambda index: 500.0 if index == slow else 0.5)
    order = [index for index, _ in trained]
    assert slow in order
    overtaken_by = sum(index > slow for index in order[: order.index(slow)])
    assert overtaken_by <= window.window - 1


def test_lengths_of_trained_episodes_are_those_of_started_ones():
    """Taking whoever finishes first would train on short episodes only; the window does not."""
    durations = [0.1 if index % 2 else 10.0 for index in range(400)]
    window = AdmissionWindow(4, max_staleness=1)
    trained, _ = simulate(window, 80, lambda index: durations[index])
    long_share = sum(durations[index] == 10.0 for index, _ in trained) / len(trained)
    assert long_share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_bound_is_reached_and_never_passed_however_wide_the_window(staleness):
    lags = []
    for slow in range(8):
        window = AdmissionWindow(4, staleness, window_fraction=1.0)
        trained, _ = simulate(window, 30, lambda index, slow=slow: 40.0 if index % 8 == slow else 0.1)
        lags += [lag for _, lag in trained]
    assert max(lags) == staleness


def test_a_group_that_is_due_is_waited_for():
    window = AdmissionWindow(2, max_staleness=1, window_fraction=1.0)
    assert window.admit(0) == [0, 1, 2, 3]
    for index in (1, 2, 3):
        window.finish(index)
    # 0, 1, 2 and 3 are due at version 1. Step 0 takes two of them, whichever.
    assert [window.take(0), window.take(0)] == [1, 2]
    window.release(1)
    window.release(2)
    assert window.admit(1) == [4, 5]
    window.finish(4)
    # Step 1 has two places left, for 3 and for 0: nothing that is due later may have one of them.
    assert window.take(1) == 3
    assert window.take(1) is None
    window.finish(0)
    assert window.take(1) == 0


def test_synchronous_training_is_on_policy():
    window = AdmissionWindow(4, max_staleness=0)
    trained, _ = simulate(window, 10, lambda index: 1.0 + index % 3)
    assert {lag for _, lag in trained} == {0}


def test_groups_of_a_checkpoint_are_issued_again_first():
    window = AdmissionWindow(2, max_staleness=1, start=9, reissue=(7, 5))
    assert window.untrained == (5, 7)
    assert window.admit(version=3) == [5, 7, 9, 10]
    assert window.next_index == 11


def test_a_group_finishes_once():
    window = AdmissionWindow(1, 0)
    (index,) = window.admit(0)
    window.finish(index)
    with pytest.raises(ValueError, match="not running"):
        window.finish(index)
