"""The task stream: pure, weighted, over several servers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.config.rollout import TaskSettings
from rollgym.trainer.tasks.task import MixtureTaskSource

MIX = [
    TaskSettings(env_id="A-v0", weight=3, kwargs={"size": 4}),
    TaskSettings(env_id="B-v0", weight=1, domain="bees", url="http://other:8000", options={"split": "train"}),
]


@given(seed=st.integers(0, 2**40), indices=st.lists(st.integers(0, 10**6), max_size=20))
def test_a_task_is_a_function_of_seed_and_index(seed, indices):
    first, second = MixtureTaskSource(MIX, seed), MixtureTaskSource(MIX, seed)
    expected = {index: first.task(index) for index in indices}
    assert {index: second.task(index) for index in reversed(indices)} == expected


def test_weights_are_kept_and_entries_carried_over():
    source = MixtureTaskSource(MIX, 0)
    tasks = [source.task(index) for index in range(2000)]
    counts = Counter(task.domain for task in tasks)
    assert counts["A-v0"] / 2000 == pytest.approx(0.75, abs=0.03)
    bees = next(task for task in tasks if task.domain == "bees")
    assert (bees.env_id, bees.url, bees.options) == ("B-v0", "http://other:8000", {"split": "train"})
    assert len({task.seed for task in tasks}) == 2000


def test_sessions_are_shared_by_server_environment_and_kwargs():
    source = MixtureTaskSource(MIX, 0)
    assert len({source.task(index).session_key for index in range(50)}) == 2


def test_a_run_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least one entry"):
        MixtureTaskSource([], 0)
