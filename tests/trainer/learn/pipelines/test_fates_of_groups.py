"""What the ledger says of the groups of a step, once the step was taken."""

import pytest
import torch

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import EpisodeBatch, episode_batch, row_builder
from rollgym.trainer.learn.distilling import DistillationLearner
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.pipelines.rl import account_for
from rollgym.trainer.learn.token_fields import TaughtFields
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from tests.support.played_groups import sharp_groups
from tests.support.tiny_models import sharp_model

TRAINED = "trained"
NONE_LEFT = "dropped/episodes:none_left"
NOT_FINITE = "dropped/update:not_finite"


def student() -> TorchBackend:
    settings = OptimizerSettings(learning_rate=1e-3, tokens_per_micro_batch=10_000)
    return TorchBackend(PolicyHead(sharp_model(), 1.0), settings, Schedule(1e-3, 0, 10, "constant"))


def cut_off(group: Group) -> None:
    for trajectory in group.trajectories:
        trajectory.outcome = TrajectoryOutcome.TRUNCATED


def fates(groups: list[Group], batch: EpisodeBatch) -> dict[str, int]:
    """Book a step, see that every group is booked once, and return how many there are of each fate."""
    ledger = Ledger()
    for group in groups:
        ledger.issued(group.index, 0)
    account_for(ledger, groups, batch, step=1)
    counts = ledger.counts()
    assert counts["issued"] == 0
    assert counts["trained"] + counts["dropped"] == len(groups)
    assert sum(count for name, count in counts.items() if name.startswith("dropped/")) == counts["dropped"]
    return {name: counts[name] for name in (TRAINED, NONE_LEFT, NOT_FINITE) if counts.get(name)}


async def booked(groups: list[Group], algorithm: dict) -> dict[str, int]:
    settings = resolve_preset("grpo", {"minibatches": 1, **algorithm})
    batch = episode_batch(groups, row_builder("trajectory"))
    await Learner(settings, Models(student()), seed=1).update(batch, step=0)
    return fates(groups, batch)


@pytest.mark.parametrize("in_statistics", [True, False])
@pytest.mark.parametrize(("lost", "expected"), [(0, {TRAINED: 3}), (2, {TRAINED: 1, NONE_LEFT: 2})])
async def test_a_group_of_which_no_episode_is_chosen_is_not_trained(in_statistics, lost, expected):
    groups = sharp_groups()
    for group in groups[:lost]:
        cut_off(group)
    episodes = {"kind": "finished", "in_statistics": in_statistics}
    assert await booked(groups, {"episodes": episodes}) == expected


async def test_a_step_of_which_no_episode_is_chosen_trains_no_group():
    groups = sharp_groups()
    for group in groups:
        cut_off(group)
    assert await booked(groups, {"episodes": {"kind": "finished"}}) == {NONE_LEFT: 3}


def none_for_the_first_group(tokens):
    """A selection of a user's whose weights are none where it sees the first group, of four episodes."""
    return torch.full(tokens.mask.shape, torch.nan if min(tokens.trajectory) < 4 else 1.0)


async def test_a_group_whose_steps_were_all_left_out_is_not_trained():
    selection = {"kind": "custom", "function": f"{__name__}:none_for_the_first_group"}
    groups = sharp_groups()
    assert await booked(groups, {"selection": selection}) == {NOT_FINITE: 3}
    found = await booked(groups, {"selection": selection, "minibatches": 12})
    assert found == {TRAINED: 2, NOT_FINITE: 1}


async def test_an_update_that_is_left_out_trains_no_group():
    groups = sharp_groups()
    segment = groups[0].trajectories[0].segments[0]
    segment.behaviour_logprobs[segment.action_mask.index(True)] = float("nan")
    assert await booked(groups, {"proximal": "behaviour"}) == {NOT_FINITE: 3}


class TaughtInPart:
    """Rows of which those of one group have nothing that a teacher could say."""

    async def rows(self, batch):
        made = []
        for row in batch.rows:
            told = row.tensors()
            if batch.episodes.groups[row.trajectory] == 1:
                told.mask[:] = False
            made.append(
                told.with_fields(
                    TaughtFields(
                        behaviour_logprobs=row.behaviour(), taught_logprobs=torch.zeros(len(row.ids))
                    ).named()
                )
            )
        return made


async def test_a_group_that_a_teacher_says_nothing_of_is_not_trained():
    groups = sharp_groups()
    batch = episode_batch(groups, row_builder("trajectory"))
    learner = DistillationLearner(
        student(), TaughtInPart(), sampled=True, largest_ratio=2.0, max_skipped_steps=1
    )
    metrics = await learner.update(batch, step=0)
    assert metrics["batch/rows"] == 8.0
    assert fates(groups, batch) == {TRAINED: 2, NONE_LEFT: 1}
