"""The training loop: what runs at the same time, and what waits for what."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.core.shutdown import GracefulShutdown
from rollgym.trainer.learn.batches import row_builder
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines import rl
from rollgym.trainer.records.checkpoint import RunState
from rollgym.trainer.records.ledger import Ledger
from tests.support.played_groups import sharp_groups
from tests.support.schedulers import scheduler_of

PATIENCE_S = 60


class Writing:
    """A tracker that writes a step's episodes no sooner than it may."""

    wants_digests = False

    def __init__(self):
        self.may_write = [threading.Event() for _ in range(3)]
        self.steps = []

    def episodes(self, step, groups):
        assert self.may_write[step].wait(PATIENCE_S), "no episode of the next step began meanwhile"

    def metrics(self, step, metrics):
        self.steps.append(step)


async def nothing(*_):
    return None


def parts_of(scheduler, tracker) -> rl.Parts:
    async def update(batch, step, version=None):
        return {"policy/optimizer_steps": 1.0}

    async def publish(backend, version):
        return {}

    return rl.Parts(
        algorithm=resolve_preset("grpo", {}),
        scheduler=scheduler,
        learner=SimpleNamespace(update=update),
        models=Models(None),
        publisher=SimpleNamespace(publish=publish),
        client=SimpleNamespace(counters=SimpleNamespace(tokens_generated=0)),
        build_rows=row_builder("trajectory"),
        ledger=Ledger(),
        tracker=tracker,
        console=SimpleNamespace(step=lambda *_: None),
        health=SimpleNamespace(note=lambda *_: {}, check=lambda: None, check_whole=lambda: None),
        saver=SimpleNamespace(save=nothing, settled=nothing, raise_if_failed=lambda: None),
    )


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_next_episodes_play_while_a_step_is_written_down(staleness):
    tracker, begun = Writing(), Counter()

    async def play(task, member, attempt):
        begun[task.index] += 1
        for step in range(2):
            # The step before it is written down: with staleness, the groups of one more had begun before.
            if task.index == 1 + staleness + step:
                tracker.may_write[step].set()
        trajectory = sharp_groups(groups=1, members=1)[0].trajectories[0]
        trajectory.task, trajectory.member, trajectory.attempt = task, member, attempt
        return trajectory

    tracker.may_write[2].set()  # none begins after the last step
    scheduler = scheduler_of(play, groups=1, size=1, staleness=staleness)
    async with asyncio.timeout(2 * PATIENCE_S):
        state = await rl.train(
            parts_of(scheduler, tracker), RunState(0, 0, 0, ()), 3, 0, nothing, GracefulShutdown()
        )
        await scheduler.close()
    assert (state.step, state.version) == (3, 3)
    assert tracker.steps == [1, 2, 3]
    assert begun == Counter(range(3 + staleness)), "no group begins that no step will train on"
    assert state.untrained == tuple(range(3, 3 + staleness))


async def test_no_episode_plays_beside_a_checkpoint_where_devices_are_shared():
    tracker, begun, saved = Writing(), Counter(), []
    for each in tracker.may_write:
        each.set()

    async def play(task, member, attempt):
        begun[task.index] += 1
        trajectory = sharp_groups(groups=1, members=1)[0].trajectories[0]
        trajectory.task, trajectory.member, trajectory.attempt = task, member, attempt
        return trajectory

    async def save(state):
        # As models that come back to their devices do, it takes a while.
        for _ in range(20):
            await asyncio.sleep(0)
        saved.append((state.step, sorted(begun)))

    scheduler = scheduler_of(play, groups=1, size=1, staleness=0)
    parts = replace(parts_of(scheduler, tracker), begins_early=False)
    parts.saver.save = save
    async with asyncio.timeout(PATIENCE_S):
        await rl.train(parts, RunState(0, 0, 0, ()), 3, 1, nothing, GracefulShutdown())
        await scheduler.close()
    assert saved == [(step, list(range(step))) for step in (1, 2, 3)]
