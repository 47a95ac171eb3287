"""New weights in the middle of a turn: what each version drew is recorded as that version drew it, and corrected so."""

import asyncio

import pytest
import torch

from rollgym.trainer.algorithms.corrections import banded, importance_weights, truncated
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.forwarding import GenerationQueue
from rollgym.trainer.learn.batches import step_rows, trajectory_rows
from rollgym.trainer.records.trajectory import Trajectory, Turn
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task
from tests.support.tiny_models import WeightsOf, reference_logprobs, sharp_model

PROMPT = [3, 4]
LENGTH = 40


async def record_with_an_update_inside(before, after):
    """One turn of an episode whose weights change while it is sampled."""
    trajectory = Trajectory(Task(0, "Any-v0", seed=1), member=0)
    recorder = Recorder(trajectory)
    async with TorchEngine(before, max_rows=2, max_length=64) as engine:
        queue = GenerationQueue(engine, 2)
        segment = recorder.place(PROMPT)
        request = GenerationRequest("0", PROMPT, SamplingParams(LENGTH), seed=7)
        reply = asyncio.create_task(queue.generate(request))
        while engine.counters.tokens_generated < LENGTH // 3:
            await asyncio.sleep(0)
        await queue.sync(WeightsOf(after), version=1)
        start, end = recorder.record(segment, await reply, turn=0)
    trajectory.turns.append(Turn(segment, start, end, observation="", reply=""))
    return trajectory


@pytest.mark.parametrize("rows_of", [trajectory_rows, step_rows])
async def test_a_turn_across_an_update_is_corrected_token_by_token(rows_of):
    before, after = sharp_model(0), sharp_model(1)
    trajectory = await record_with_an_update_inside(before, after)
    (segment,) = trajectory.segments
    versions = segment.versions[len(PROMPT) :]
    drawn_before = versions.count(0)
    assert versions == [0] * drawn_before + [1] * (LENGTH - drawn_before)
    assert 0 < drawn_before < LENGTH
    assert trajectory.oldest_version == 0

    by_version = [reference_logprobs(model, segment.ids) for model in (before, after)]
    for place in range(len(PROMPT), len(segment.ids)):
        drawn_by = segment.versions[place]
        assert segment.behaviour_logprobs[place] == pytest.approx(by_version[drawn_by][place - 1], abs=1e-4)

    # Trained at version 1: tokens that it drew itself weigh 1, those of version 0 what their own ratio says.
    (row,) = rows_of(0, trajectory)
    assert row.versions == segment.versions
    mask = torch.tensor([row.mask])
    proximal = torch.tensor([[0.0, *by_version[1]]])
    weights = importance_weights(proximal, torch.tensor([row.behaviour_logprobs]), mask)[mask]
    ratio = torch.tensor(
        [new - old for old, new in zip(by_version[0], by_version[1], strict=True)][len(PROMPT) - 1 :]
    )
    expected = torch.where(torch.tensor(versions) == 0, ratio.clamp(-20, 20).exp(), torch.ones(LENGTH))
    assert weights.tolist() == pytest.approx(expected.tolist(), rel=2e-3)
    outside = (weights - 1).abs() > 0.5
    assert bool(outside[:drawn_before].any())
    assert not bool(outside[drawn_before:].any())
    assert truncated(weights, 2.0)[drawn_before:].tolist() == weights[drawn_before:].tolist()
    assert float(truncated(weights, 2.0).max()) <= 2.0
    kept = banded(weights, 0.5, 1.5) > 0
    assert bool(kept[drawn_before:].all())
    assert not bool(kept[:drawn_before].all())
