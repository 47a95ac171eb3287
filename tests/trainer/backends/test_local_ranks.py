"""Ranks as child processes: what they answer, how they end, and that none of them is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.backends.batching import balanced, row_cost
from rollgym.trainer.backends.local_ranks import LocalRanks
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.backends.transport import RankDiedError, pack, unpack
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.pieces import flattened, nested
from tests.support.forked_ranks import ForkedRanks
from tests.support.patient_ranks import apart, patient, restless
from tests.support.rank_recipes import impatient, killed_at, stopped_at
from tests.support.sharded_models import some_rows

ROOT = Path(__file__).parents[3]
NOTICED_S = 20.0
"""Far below the ranks' own time-out, and far above what a machine under load needs to notice a closed pipe."""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waits for may still have its number."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def wait_until_gone(pids: list[int]) -> bool:
    limit = time.monotonic() + NOTICED_S
    while time.monotonic() < limit and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return all(gone(pid) for pid in pids)


@pytest.fixture
def opened(tmp_path):
    transport = ForkedRanks(tmp_path / "ranks")
    ranks = Ranks(transport, MeshShape(data=2), "cpu", timeout_s=600.0)
    ranks.start()
    ranks.everywhere("build", "it", patient)
    yield transport, ranks
    ranks.close()


@pytest.mark.slow
def test_a_call_that_fails_in_one_rank_ends_all_of_them(opened):
    transport, ranks = opened
    assert ranks.everywhere("ask", "it", "meet") == [1, 1]
    pids = transport.pids
    with pytest.raises(ValueError, match="no such thing"):
        ranks.everywhere("ask", "it", "fail", 1, "no such thing")
    assert all(gone(pid) for pid in pids), "closing waits until they are gone"
    with pytest.raises(RunError, match="the ranks have ended: no such thing"):
        ranks.everywhere("ask", "it", "meet")
    ranks.close()


def test_the_death_of_a_rank_is_told_at_once_with_its_last_words(opened, tmp_path):
    transport, ranks = opened
    pids = transport.pids
    began = time.monotonic()
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 is gone \(killed by signal 9") as died:
        ranks.everywhere("ask", "it", "die", 1, "I see a light\n")
    assert time.monotonic() - began < NOTICED_S, "the others' time-out is ten minutes"
    assert "I see a light" in str(died.value)
    assert died.value.rank == 1
    assert isinstance(died.value, RunError)
    assert "I see a light" in (tmp_path / "ranks" / "rank_1.log").read_text()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (killed_at, r"rank \d of 2 is gone \(killed by signal 9"),
        (stopped_at, r"rank \d of 2 does not answer, and the others have \(backend.timeout_s 600\)"),
    ],
    ids=["killed", "hung"],
)
def test_a_rank_that_is_lost_in_a_step_ends_the_others(loss, told, tmp_path):
    transport = ForkedRanks(tmp_path / "ranks")
    ranks = Ranks(transport, MeshShape(data=2), "cpu", timeout_s=600.0)
    ranks.start()
    try:
        pids = transport.pids
        backend = RankedBackend(ranks, "policy", impatient, 16)
        began = time.monotonic()
        with pytest.raises(RankDiedError, match=told) as lost:
            backend.step(some_rows(), partial(loss, row=3))
        assert time.monotonic() - began < NOTICED_S
        assert all(gone(pid) for pid in pids)
        with pytest.raises(RunError, match="the ranks have ended"):
            backend.forward(some_rows())
        assert lost.value.rank in (0, 1)
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_rank_that_stands_still_blocks_nobody_who_gives_it_more_than_a_pipe_holds(tmp_path):
    transport = ForkedRanks(tmp_path / "ranks")
    ranks = Ranks(transport, MeshShape(data=2), "cpu", timeout_s=600.0)
    ranks.start()
    try:
        ranks.everywhere("build", "it", restless)
        os.kill(transport.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 of 2 does not answer, and the others have"):
            ranks.everywhere("ask", "it", "take", torch.zeros(10_000_000))
        assert time.monotonic() - began < NOTICED_S
    finally:
        ranks.close()


def test_closing_ends_ranks_that_are_busy(opened):
    transport, ranks = opened
    pids = transport.pids
    failures = []

    def ask():
        try:
            ranks.everywhere("ask", "it", "compute", 600)
        except RunError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    ranks.close()
    asking.join(NOTICED_S)
    assert not asking.is_alive(), "whoever waits for an answer hears that none comes"
    assert failures
    assert all(gone(pid) for pid in pids)


DRIVER = """
import sys
from pathlib import Path
from tests.support.patient_ranks import patient
from rollgym.trainer.backends.local_ranks import LocalRanks
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import Ranks
transport = LocalRanks(Path(sys.argv[1]))
ranks = Ranks(transport, MeshShape(data=2), "cpu", 600.0)
ranks.start()
ranks.everywhere("build", "it", patient)
print(*transport.pids, flush=True)
ranks.everywhere("ask", "it", "compute", 600)
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_rank_behind(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        os.kill(driver.pid, signal.SIGKILL)
    assert len(pids) == 2
    assert wait_until_gone(pids)


def test_a_rank_that_does_not_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "not a number")
    transport = LocalRanks(tmp_path)
    with pytest.raises(RankDiedError, match=r"rank 0 of 1 is gone \(exit code 1(.|\n)*PYTHONHASHSEED"):
        transport.start(1)
    assert transport.pids == []


@pytest.mark.parametrize("taken", ["ranks", "ranks/rank_0.log"])
def test_a_log_that_cannot_be_written_is_named(tmp_path, taken):
    path = tmp_path / taken
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if path.suffix else path.touch()
    transport = LocalRanks(tmp_path / "ranks")
    with pytest.raises(WriteError, match=f"cannot write {path}: (File exists|Is a directory)"):
        transport.start(1)
    assert transport.pids == []


def test_a_rank_that_does_not_come_up_is_waited_for_so_long(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    transport = LocalRanks(tmp_path / "ranks", start_timeout_s=1.0)
    with pytest.raises(RunError, match=r"rank 0 of 2 was not ready within 1 s \(cluster.start_timeout_s\)"):
        transport.start(2)
    assert transport.pids == []


@pytest.mark.slow
def test_groups_that_libraries_make_wait_no_longer_than_was_asked_for(tmp_path):
    ranks = Ranks(ForkedRanks(tmp_path / "ranks"), MeshShape(data=2), "cpu", timeout_s=600.0)
    ranks.start()
    try:
        ranks.everywhere("build", "it", apart)
        began = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 of 2 does not answer, and the others have"):
            ranks.everywhere("ask", "it", "meet", 1)
        assert time.monotonic() - began < NOTICED_S, "torch's own patience is half an hour"
    finally:
        ranks.close()


@given(st.lists(st.integers(1, 4000), max_size=60), st.integers(1, 9))
def test_rows_are_divided_whole_and_evenly(lengths, parts):
    costs = [row_cost(length, 64) for length in lengths]
    divided = balanced(costs, parts)
    assert sorted(place for part in divided for place in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in divided)
    totals = [sum(costs[place] for place in part) for part in divided]
    # No part could give a row to another one and both be the better for it.
    dearest = max(range(parts), key=totals.__getitem__)
    for place in divided[dearest]:
        assert totals[dearest] <= min(totals) + costs[place]


def test_a_view_is_sent_without_what_it_is_a_view_of():
    table = torch.zeros(1000, 1000)
    data = pack({"row": table[3, :5], "turned": table[:3, :2].T})
    assert len(data) < 1000
    back = unpack(data)
    assert torch.equal(back["row"], table[3, :5])
    assert back["turned"].shape == (2, 3)
    empty = unpack(pack(torch.zeros(0, 4, dtype=torch.bfloat16)))
    assert (empty.shape, empty.dtype) == ((0, 4), torch.bfloat16)


def test_an_error_of_a_rank_can_be_sent():
    error = pickle.loads(pickle.dumps(RankDiedError("gone", 3)))
    assert (str(error), error.rank) == ("gone", 3)


@given(
    st.recursive(
        st.integers() | st.text(max_size=3),
        lambda inner: st.dictionaries(st.integers(0, 9) | st.sampled_from("abc"), inner, max_size=4),
        max_leaves=12,
    )
)
def test_states_survive_their_way_as_paths(content):
    tree = {"model": content, "steps": 3}
    assert nested(flattened(tree)) == tree
