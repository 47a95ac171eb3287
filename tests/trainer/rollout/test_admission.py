"""The staleness bound, no starvation, and oldest-first order, under a simulated clock."""

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.rollout.admission import AdmissionWindow


@dataclass
class Played:
    """What a simulated run did: (index, lag) of what was trained, in order, and what became of the others."""

    trained: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    peak: int = 0


def simulate(
    window: AdmissionWindow,
    steps: int,
    duration_of,
    train_duration: float = 1.0,
    is_dropped=lambda index: False,
) -> Played:
    """Play `steps` training steps on a simulated clock; groups end as failed or left out where `is_dropped` says so."""
    clock, version = 0.0, 0
    running: list[tuple[float, int]] = []
    stopped: set[tuple[float, int]] = set()
    played = Played()

    def admit():
        for index in window.admit(version):
            heapq.heappush(running, (clock + duration_of(index), index))

    def one_ends():
        nonlocal clock
        entry = heapq.heappop(running)
        clock = max(clock, entry[0])
        if entry in stopped:
            stopped.discard(entry)
        elif is_dropped(entry[1]):
            played.dropped.append(entry[1])
            window.release(entry[1])
        else:
            window.finish(entry[1])

    for _ in range(steps):
        taken = []
        admit()
        while len(taken) < window.groups_per_step:
            played.peak = max(
                played.peak, len(window.untrained) - len(set(played.aside) & set(window.untrained))
            )
            index = window.take(version)
            if index is None:
                one_ends()
                admit()
                continue
            taken.append(index)
        late = window.put_aside(version)
        played.aside += late
        stopped |= {entry for entry in running if entry[1] in late}
        end = clock + train_duration
        # Episodes go on while the step trains.
        while running and running[0][0] <= end:
            one_ends()
        clock = end
        for index in taken:
            played.trained.append((index, version - window.admitted_version(index)))
            window.release(index)
        version += 1
    return played


@settings(max_examples=150)
@given(
    groups=st.integers(1, 6),
    staleness=st.integers(0, 4),
    fraction=st.floats(0.0, 1.0),
    durations=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=40),
    drops=st.lists(st.booleans(), min_size=1, max_size=30).filter(lambda drops: not all(drops)),
)
def test_lag_is_bounded_and_no_group_starves(groups, staleness, fraction, durations, drops):
    window = AdmissionWindow(groups, staleness, fraction)
    played = simulate(
        window,
        25,
        duration_of=lambda index: durations[index % len(durations)],
        is_dropped=lambda index: drops[index % len(drops)],
    )
    assert max(lag for _, lag in played.trained) <= staleness
    assert len(played.trained) == 25 * groups
    assert played.peak <= window.budget
    assert not played.aside
    # Every admitted group is trained, dropped or still within the budget: none was thrown away, none counted twice.
    indices = [index for index, _ in played.trained]
    assert sorted([*indices, *played.dropped, *window.untrained]) == list(range(window.next_index))


@settings(max_examples=150)
@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 3),
    extra=st.integers(1, 6),
    durations=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=40),
    drops=st.lists(st.booleans(), min_size=1, max_size=30).filter(lambda drops: not all(drops)),
)
def test_what_is_put_aside_is_trained_in_a_later_round_within_the_bound(
    groups, staleness, extra, durations, drops
):
    window = AdmissionWindow(groups, staleness, extra=extra)
    played = simulate(
        window,
        40,
        duration_of=lambda index: durations[index % len(durations)],
        is_dropped=lambda index: drops[index % len(drops)],
    )
    assert max(lag for _, lag in played.trained) <= staleness
    # Nobody is put aside twice, so nobody starves; fewer than a round's groups wait for theirs.
    assert len(set(played.aside)) == len(played.aside)
    indices = [index for index, _ in played.trained]
    assert len(indices) == len(set(indices)) == 40 * groups
    assert sorted([*indices, *played.dropped, *window.untrained]) == list(range(window.next_index))


@settings(max_examples=100)
@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 3),
    extra=st.integers(1, 6),
    durations=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=40),
    steps=st.integers(1, 15),
)
def test_over_a_resume_nobody_of_a_long_round_is_put_aside_again(groups, staleness, extra, durations, steps):
    def duration_of(index):
        return durations[index % len(durations)]

    killed = AdmissionWindow(groups, staleness, extra=extra)
    before = simulate(killed, steps, duration_of)
    assert {*killed.aside, *killed.long_round} <= set(killed.untrained)
    resumed = AdmissionWindow(
        groups,
        staleness,
        start=killed.next_index,
        reissue=killed.untrained,
        aside=killed.aside,
        long_round=killed.long_round,
        extra=extra,
    )
    assert resumed.untrained == killed.untrained
    after = simulate(resumed, 40, duration_of)
    assert not {*killed.aside, *killed.long_round} & set(after.aside)
    assert max(lag for _, lag in after.trained) <= staleness
    indices = [index for index, _ in [*before.trained, *after.trained]]
    assert sorted([*indices, *resumed.untrained]) == list(range(resumed.next_index))


def test_long_groups_come_in_rounds_of_their_own_and_none_is_lost():
    """RollPacker's schedule: short rounds with extra groups that need not wait, long rounds that wait for all."""
    durations = [60.0 if index % 5 == 4 else 1.0 for index in range(3000)]
    window = AdmissionWindow(8, 0, extra=2)
    played = simulate(window, 200, lambda index: durations[index])
    order = [index for index, _ in played.trained]
    rounds = [order[start : start + 8] for start in range(0, len(order), 8)]
    long_share = [sum(durations[index] > 1 for index in each) / 8 for each in rounds]
    assert set(long_share) == {0.0, 1.0}
    assert played.aside
    # What is trained has the lengths of what was started, but for what is under way at the end.
    assert sum(durations[index] > 1 for index in order) / len(order) == pytest.approx(0.2, abs=0.01)


@given(groups=st.integers(1, 5), slow=st.integers(0, 4))
def test_one_slow_group_is_overtaken_by_less_than_a_window(groups, slow):
    window = AdmissionWindow(groups, max_staleness=2, window_fraction=0.5)
    played = simulate(window, 20, lambda index: 500.0 if index == slow else 0.5)
    order = [index for index, _ in played.trained]
    assert slow in order
    overtaken_by = sum(index > slow for index in order[: order.index(slow)])
    assert overtaken_by <= window.window - 1


def test_lengths_of_trained_episodes_are_those_of_started_ones():
    """Taking whoever finishes first would train on short episodes only; the window does not."""
    durations = [0.1 if index % 2 else 10.0 for index in range(400)]
    window = AdmissionWindow(4, max_staleness=1)
    trained = simulate(window, 80, lambda index: durations[index]).trained
    long_share = sum(durations[index] == 10.0 for index, _ in trained) / len(trained)
    assert long_share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_bound_is_reached_and_never_passed_however_wide_the_window(staleness):
    lags = []
    for slow in range(8):
        window = AdmissionWindow(4, staleness, window_fraction=1.0)
        trained = simulate(window, 30, lambda index, slow=slow: 40.0 if index % 8 == slow else 0.1).trained
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
    trained = simulate(window, 10, lambda index: 1.0 + index % 3).trained
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
