"""Training, hashing and saving leave the event loop free: each of them here waits for something the loop must do."""

import asyncio
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines import rl
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState, load_checkpoint
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.rollout_log import Entry, EpisodeKey, RolloutLog
from rollgym.trainer.rollout.log_replay import LogReplay
from tests.support.tiny_models import sharp_model

PATIENCE_S = 60


class Gate:
    """Work in a thread that goes on only once the event loop has turned."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()
        self.reached = asyncio.Event()

    def wait(self):
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._opened.wait(PATIENCE_S), "the event loop did not turn"

    async def open(self):
        await self.reached.wait()
        self._opened.set()


class Slow(TorchBackend):
    """A backend each of whose works waits at a gate."""

    gate: Gate

    def state_dict(self):
        self.gate.wait()
        return super().state_dict()

    def digest(self, into):
        self.gate.wait()
        super().digest(into)

    def not_finite(self):
        self.gate.wait()
        return super().not_finite()


@pytest.fixture
def parts(tmp_path):
    backend = Slow(PolicyHead(sharp_model(), 1.0), OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))
    return SimpleNamespace(
        algorithm=resolve_preset("grpo", {}),
        tracker=SimpleNamespace(flush=lambda: None, scores={}),
        ledger=Ledger(),
        models=Models(backend),
        checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=2),
    )


def saver(parts, **settings):
    return Saver(parts.models, parts.checkpoints, parts.tracker, parts.ledger, **settings)


class Client:
    version = 0

    async def sync(self, source, version):
        self.version = version


@pytest.mark.parametrize("work", ["save", "digest", "publish"])
async def test_the_loop_turns_meanwhile(parts, work):
    gate = parts.models.policy.gate = Gate()
    doing = {
        "save": lambda: saver(parts).save(RunState(1, 1, 0, ())),
        "digest": lambda: asyncio.to_thread(rl.digests, [], parts.models),
        "publish": lambda: WeightPublisher([Client()]).publish(parts.models.policy, 1),
    }[work]
    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(doing(), gate.open())


async def test_the_loop_turns_while_the_rollout_log_is_settled(tmp_path, monkeypatch):
    """A disk may take seconds to sync a file or to delete one: what is sampled meanwhile goes into the next one."""
    gate = Gate()
    log = RolloutLog(tmp_path, durable=True, say=pytest.fail)
    log_replay = LogReplay(log)
    log.append(Entry("reply", EpisodeKey(0, 0, 0), ("settled",)))
    monkeypatch.setattr(os, "fdatasync", lambda _: gate.wait())
    async with asyncio.timeout(2 * PATIENCE_S):
        settling = asyncio.create_task(log_replay.settle(1, []))
        await gate.reached.wait()
        log.append(Entry("reply", EpisodeKey(1, 0, 0), ("meanwhile",)))
        await gate.open()
        await settling
    log.close()
    left = RolloutLog(tmp_path, durable=False, say=pytest.fail)
    assert [entry.fields for entry in left.read()] == [("meanwhile",)]


async def test_a_cancelled_save_is_written_to_its_end(parts):
    gate = parts.models.policy.gate = Gate()
    saving = asyncio.create_task(saver(parts).save(RunState(3, 3, 0, ())))
    async with asyncio.timeout(2 * PATIENCE_S):
        await gate.reached.wait()
        saving.cancel()
        await asyncio.sleep(0)
        saving.cancel()
        assert not saving.done()
        await gate.open()
        with pytest.raises(asyncio.CancelledError):
            await saving
    checkpoint = load_checkpoint(parts.checkpoints.latest())
    assert checkpoint.state.step == 3
    for name, parameter in sharp_model().named_parameters():
        assert torch.equal(checkpoint.parts["policy"]["model"][name], parameter)


async def test_what_goes_wrong_in_work_that_is_done_to_its_end_is_told():
    async def fail():
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await run_shielded(fail())
