"""Checkpoints that are written while training goes on are those of their step, whole or not there."""

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState, load_checkpoint
from rollgym.trainer.records.ledger import Ledger
from tests.support.kills import killed_at

PATIENCE_S = 60


class Counting:
    """Models whose every number is the step; `train` changes them in place, as an optimizer does."""

    def __init__(self, size=4):
        self.weight = torch.zeros(size)
        self.pieces = None

    def state_dicts(self):
        state = {"policy": {"model": {"weight": self.weight}, "states": [(self.weight,)]}}
        return state | ({} if self.pieces is None else {"critic": self.pieces})

    def train(self):
        self.weight += 1


class Held(CheckpointStore):
    """A store whose writing waits."""

    def __init__(self, directory):
        super().__init__(directory, keep=2)
        self.reached, self.open = threading.Event(), threading.Event()

    def finish(self, *arguments):
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return super().finish(*arguments)


class Settled:
    """Notes of which checkpoints the rollout log was told."""

    def __init__(self):
        self.tasks = []

    async def settle(self, next_task, untrained):
        self.tasks.append(next_task)


def saver(models, store, log_replay=None, *, asynchronous=True):
    tracker = SimpleNamespace(flush=lambda: None, scores={})
    return Saver(models, store, tracker, Ledger(), log_replay, asynchronous=asynchronous)


def state_of(step):
    return RunState(step, step, step, ())


def values_of(checkpoint):
    policy = checkpoint.parts["policy"]
    return set(policy["model"]["weight"].tolist()) | set(policy["states"][0][0].tolist())


async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    models, store, log_replay = Counting(), Held(tmp_path), Settled()
    saving = saver(models, store, log_replay)
    models.train()
    async with asyncio.timeout(PATIENCE_S):
        await saving.save(state_of(1))
        assert await asyncio.to_thread(store.reached.wait, PATIENCE_S)
        models.train()
        assert (store.latest(), log_replay.tasks) == (None, []), (
            "the log is kept until the checkpoint is whole"
        )
        store.open.set()
        await saving.save(state_of(2))
        await saving.settled()
    assert log_replay.tasks == [1, 2]
    for step in (1, 2):
        checkpoint = load_checkpoint(tmp_path / f"step_00000{step}")
        assert (checkpoint.state.step, values_of(checkpoint)) == (step, {float(step)})


class Pieces:
    """A part that writes itself, as it is when it is asked to."""

    def __init__(self, models):
        self._models = models

    def write(self, folder):
        (folder / "piece").write_text(str(float(self._models.weight[0])))


async def test_parts_that_write_themselves_are_those_of_their_step(tmp_path):
    models, store = Counting(), Held(tmp_path)
    models.pieces = Pieces(models)
    saving = saver(models, store)
    models.train()
    async with asyncio.timeout(PATIENCE_S):
        await saving.save(state_of(1))
        models.train()
        store.open.set()
        await saving.settled()
    checkpoint = load_checkpoint(store.latest())
    assert (checkpoint.parts["critic"].folder / "piece").read_text() == "1.0"
    assert values_of(checkpoint) == {1.0}


async def test_who_waits_for_a_checkpoint_and_is_cancelled_has_it_written(tmp_path):
    models, store = Counting(), Held(tmp_path)
    saving = saver(models, store)
    async with asyncio.timeout(PATIENCE_S):
        await saving.save(state_of(1))
        waiting = asyncio.create_task(saving.settled())
        await asyncio.to_thread(store.reached.wait, PATIENCE_S)
        waiting.cancel()
        store.open.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert load_checkpoint(store.latest()).state.step == 1


async def test_what_could_not_be_written_is_told_once(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saving = saver(Counting(), CheckpointStore(tmp_path / "checkpoints", keep=1))
    with pytest.raises(WriteError, match="cannot write"):
        await saving.save(state_of(1))
    await saving.settled()
    models = Counting()
    models.weight[0] = float("inf")
    saving = saver(models, CheckpointStore(tmp_path, keep=1))
    await saving.save(state_of(1))
    await asyncio.wait({saving._writing}, timeout=PATIENCE_S)
    with pytest.raises(RunError, match="no checkpoint of step 1 is written"):
        saving.raise_if_failed()
    saving.raise_if_failed()


async def _train_and_save(directory, steps):
    models = Counting()
    saving = saver(models, CheckpointStore(directory, keep=2))
    for step in range(1, steps + 1):
        models.train()
        await saving.save(state_of(step))
        models.train()  # in the middle of the step that follows
        models.weight -= 1
    await saving.settled()


def test_a_kill_at_any_operation_leaves_checkpoints_of_their_own_step(tmp_path):
    found = set()
    for point in count(step=4):
        directory = tmp_path / "run"
        killed = killed_at(point, lambda: asyncio.run(_train_and_save(tmp_path / "run", 2)))
        newest = CheckpointStore(directory, keep=2).load_newest(pytest.fail) if directory.exists() else None
        if newest is not None:
            assert values_of(newest) == {float(newest.state.step)}
        found.add(None if newest is None else newest.state.step)
        shutil.rmtree(directory, ignore_errors=True)
        if not killed:
            break
    assert found == {None, 1, 2}


def _save_for_ever(directory):
    store = CheckpointStore(directory, keep=2)
    saved = store.highest_step()
    while True:
        saved += 1
        store.save(state_of(saved), {"policy": {"weight": torch.full((200_000,), float(saved))}})


def test_kills_at_random_moments_leave_checkpoints_of_their_own_step(tmp_path):
    """In the middle of a write of some megabytes, too, which is no operation of its own."""
    generator, newest = random.Random(7), []
    store = CheckpointStore(tmp_path, keep=2)
    for _ in range(10):
        before, until = store.latest(), time.monotonic() + PATIENCE_S
        child = os.fork()
        if child == 0:
            try:
                _save_for_ever(tmp_path)
            finally:
                os._exit(1)
        while store.latest() == before:
            assert time.monotonic() < until
            time.sleep(0.0005)
        time.sleep(generator.uniform(0.0, 0.02))  # in the middle of the next one
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the work failed by itself"
        checkpoint = store.load_newest(pytest.fail)
        assert set(checkpoint.parts["policy"]["weight"].tolist()) == {float(checkpoint.state.step)}
        newest.append(checkpoint.state.step)
    assert len(newest) == 10
