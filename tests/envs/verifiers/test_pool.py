"""The pool of processes: what hangs or dies there costs a process, and nothing else."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rollgym.envs.verifiers.pool import CallFailed, CallTimeout, NoProcess, PoolShare, ProcessPool
from rollgym.envs.verifiers.symbolic import SymbolicComparison

TARGET = "tests.support.pooled:act"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch):
    """By the processes of a pool, also when `pytest` was started as a command, which leaves the folder out."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def pool():
    pool = ProcessPool(TARGET, 2)
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_hung_call_costs_one_process_that_is_replaced(pool):
    first = pool.call({"do": "say", "what": "здравствуй"}, 30)
    assert first["said"] == "здравствуй"
    with pytest.raises(CallTimeout, match=r"no result within 0\.3 s"):
        pool.call({"do": "hang"}, 0.3)
    assert not alive(first["pid"])
    second = pool.call({"do": "say"}, 30)
    assert second["pid"] != first["pid"]
    assert pool.replaced == 1


def test_what_a_call_stands_in_line_for_a_processor_is_none_of_its_time():
    def nearly_always(pid):
        return 0.9 * time.monotonic()

    with closing(ProcessPool(TARGET, 1, queued=nearly_always)) as pool:
        pool.call({"do": "say"}, 30)
        assert pool.call({"do": "sleep", "seconds": 1.0}, 0.7) == "awake"
        begun = time.monotonic()
        with pytest.raises(CallTimeout):
            pool.call({"do": "sleep", "seconds": 60}, 0.3)
        assert time.monotonic() - begun < 20
    with closing(ProcessPool(TARGET, 1, queued=lambda pid: None)) as pool:
        pool.call({"do": "say"}, 30)
        with pytest.raises(CallTimeout):
            pool.call({"do": "sleep", "seconds": 1.0}, 0.7)


def test_what_raises_dies_or_wants_too_much_memory_fails_by_itself(pool):
    pid = pool.call({"do": "say"}, 30)["pid"]
    with pytest.raises(CallFailed, match="KeyError: 'dance'"):
        pool.call({"do": "dance"}, 30)
    with pytest.raises(CallFailed, match="MemoryError"):
        pool.call({"do": "eat"}, 30)
    assert pool.call({"do": "say"}, 30)["pid"] == pid, "a function that raises costs no process"
    with pytest.raises(CallFailed, match="the process died"):
        pool.call({"do": "die"}, 30)
    assert pool.call({"do": "say"}, 30)["pid"] != pid


def test_calls_from_many_threads_share_the_processes(pool):
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda what: pool.call({"do": "say", "what": what}, 30), range(40)))
    assert [each["said"] for each in said] == list(range(40))
    assert {each["pid"] for each in said} <= set(pool.pids())
    assert len(pool.pids()) <= 2


def test_closing_ends_the_processes_and_whoever_waits():
    pool = ProcessPool(TARGET, 1)
    pid = pool.call({"do": "say"}, 30)["pid"]
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(CallFailed):
            pool.call({"do": "sleep", "seconds": 60}, 60)
        failed.set()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    pool.close()
    pool.close()
    for thread in threads:
        thread.join(30)
    assert failed.is_set()
    assert not alive(pid)


def test_users_in_one_process_share_one_pool():
    one, other = PoolShare(TARGET), PoolShare(TARGET)
    assert one.pool is other.pool
    pid = one.pool.call({"do": "say"}, 30)["pid"]
    one.close()
    one.close()
    assert other.pool.call({"do": "say"}, 30)["pid"] == pid
    other.close()
    assert PoolShare(TARGET).pool.call({"do": "say"}, 30)["pid"] == pid, "it stays for who comes next"


def test_a_process_ends_with_its_parent_even_while_it_hangs():
    script = (
        "import os, threading, time\n"
        "from rollgym.envs.verifiers.pool import ProcessPool\n"
        f"pool = ProcessPool({TARGET!r})\n"
        "print(pool.call({'do': 'say'}, 30)['pid'], flush=True)\n"
        "threading.Thread(target=pool.call, args=({'do': 'hang'}, 60), daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    # It may take a moment to notice, and it is no child of ours to wait for.
    for _ in range(1_000_000):
        if not alive(pid):
            break
    assert not alive(pid)


def test_a_process_that_cannot_be_started_is_no_fault_of_the_call(monkeypatch):
    died = pytest.raises(NoProcess, match="no process could be started: the process died")
    with closing(ProcessPool("tests.support.pooled:missing")) as pool, died:
        pool.call({"do": "say"}, 30)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with closing(ProcessPool(TARGET)) as pool, pytest.raises(NoProcess, match="No such file"):
        pool.call({"do": "say"}, 30)


def test_an_answer_is_not_blamed_where_there_is_no_process_to_compare_it(monkeypatch):
    class Pool:
        away = False

        def call(self, request, timeout_s):
            if self.away:
                raise NoProcess("no process could be started")
            if request["answer"] == "deadly":
                raise CallFailed("the process died")
            return {"equal": False, "gold": "expression", "answer": "expression"}

    monkeypatch.setattr(PoolShare, "pool", pool := Pool())
    comparison = SymbolicComparison(1, 1.0)

    def judge(gold, answer):
        return comparison.compare(gold, {answer: answer}, {}).judgement

    assert judge("x", "deadly") == "unreadable_answer"
    pool.away = True
    assert [judge("x", "deadly"), judge("y", "deadly")] == ["comparison_failed"] * 2
    pool.away = False
    assert judge("y", "deadly") == "unreadable_answer", "it was no fault of the reference's either"
