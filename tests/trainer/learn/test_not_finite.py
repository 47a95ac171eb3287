"""Numbers that are not finite: such a step is left out and counted, and nothing of it is published or saved."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.numbers import not_finite
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.pipelines.sft import train_supervised
from rollgym.trainer.learn.weights.publisher import PublishError, WeightPublisher
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState
from rollgym.trainer.records.ledger import Ledger
from tests.support.learner_models import assert_equal_weights, groups_for_all, models_of, updated
from tests.support.played_groups import sharp_groups
from tests.support.tiny_models import sharp_model


def with_a_nan_at_sampling(groups):
    """Log-probabilities at sampling that no engine's check saw."""
    segment = groups[0].trajectories[0].segments[0]
    segment.behaviour_logprobs[segment.action_mask.index(True)] = float("nan")
    return groups


async def test_a_step_that_is_not_finite_is_left_out_and_counted():
    settings = resolve_preset("grpo", {"proximal": "behaviour"})
    models = models_of(settings)
    learner = Learner(settings, models, seed=1)
    groups = with_a_nan_at_sampling(sharp_groups())
    metrics = await learner.update(episode_batch(groups, row_builder("trajectory")), step=0)
    assert metrics["policy/skipped_steps"] == 1.0
    assert metrics["policy/optimizer_steps"] == 0.0
    assert all(np.isfinite(list(metrics.values())))
    assert_equal_weights(dict(sharp_model().named_parameters()), dict(models.policy.export()))
    assert not list(not_finite(models.policy.state_dict()))
    # The next one is as if nothing had been.
    fine = episode_batch(sharp_groups(), row_builder("trajectory"))
    assert (await learner.update(fine, step=1))["policy/optimizer_steps"] == 1.0
    assert not list(not_finite(models.policy.state_dict()))


async def test_steps_that_are_never_finite_end_the_run():
    settings = resolve_preset("grpo", {"proximal": "behaviour"})
    learner = Learner(settings, models_of(settings), seed=1, max_skipped_steps=2)
    batch = episode_batch(with_a_nan_at_sampling(sharp_groups()), row_builder("trajectory"))
    for step in range(2):
        await learner.update(batch, step)
    with pytest.raises(
        RunError, match=r"3 optimizer steps of the policy in a row .*max_skipped_steps 2.*: the loss"
    ):
        await learner.update(batch, 2)


async def test_a_critic_that_is_not_finite_trains_nothing():
    settings = resolve_preset("ppo", {"minibatches": 1})
    models = models_of(settings)
    with torch.no_grad():
        models.critic._head.model.head.bias.fill_(float("nan"))
    metrics = await Learner(settings, models, seed=1).update(
        episode_batch(sharp_groups(), row_builder("trajectory")), step=0
    )
    assert metrics == {"policy/optimizer_steps": 0.0, "policy/skipped_steps": 1.0}
    assert_equal_weights(dict(sharp_model().named_parameters()), dict(models.policy.export()))


def sometimes_nothing(batch):
    return [[float("nan") for _ in turns] for turns in batch.rewards]


async def test_an_advantage_of_the_users_that_is_no_number_trains_nothing():
    function = f"{__name__}:sometimes_nothing"
    settings = resolve_preset("grpo", {"advantage": {"kind": "custom", "function": function}})
    learner = Learner(settings, models_of(settings), seed=1, max_skipped_steps=1)
    batch = episode_batch(sharp_groups(), row_builder("trajectory"))
    assert (await learner.update(batch, step=0))["policy/skipped_steps"] == 1.0
    with pytest.raises(RunError, match=f"an advantage of {function} is nan"):
        await learner.update(batch, step=1)


class NoClient:
    version = 0

    async def sync(self, source, version):
        raise AssertionError("nothing may be sent")


def saver(models: Models, store: CheckpointStore) -> Saver:
    return Saver(models, store, SimpleNamespace(flush=lambda: None, scores={}), Ledger())


async def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path):
    backend = models_of(resolve_preset("grpo", {})).policy
    with torch.no_grad():
        next(iter(backend._head.model.parameters()))[0, 0] = float("inf")
    with pytest.raises(PublishError, match="the weights of version 4 are not finite"):
        await WeightPublisher([NoClient()]).publish(backend, 4)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    with pytest.raises(RunError, match="no checkpoint of step 3 is written"):
        await saver(Models(backend), store).save(RunState(3, 3, 0, ()))
    assert store.latest() is None


@pytest.mark.parametrize("broken", ["optimizer", "critic"])
async def test_optimizers_and_critics_that_are_not_finite_are_not_saved(tmp_path, broken):
    settings = resolve_preset("ppo", {"minibatches": 1})
    models = models_of(settings)
    await Learner(settings, models, seed=1).update(
        episode_batch(sharp_groups(), row_builder("trajectory")), step=0
    )
    if broken == "optimizer":
        state = next(iter(models.policy._optimizer.state.values()))
        state["exp_avg_sq"].view(-1)[0] = float("inf")
    else:
        with torch.no_grad():
            models.critic._head.model.head.bias.fill_(float("nan"))
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(RunError, match=f"because .*{broken}"):
        await saver(models, store).save(RunState(3, 3, 0, ()))
    assert store.latest() is None


def test_a_warm_start_that_is_never_finite_ends():
    backend = models_of(resolve_preset("grpo", {})).policy
    with torch.no_grad():
        next(iter(backend._head.model.parameters())).fill_(float("nan"))
    rows = [TrainRow(torch.tensor([1, 2, 3]), torch.tensor([False, True, True]))]
    with pytest.raises(RunError, match="2 optimizer steps of the warm start in a row"):
        list(train_supervised(backend, rows, epochs=3, batch_rows=1, seed=0, max_skipped_steps=1))


def endless_for_the_first_group(tokens):
    """A selection of a user's whose weights are none where it sees the episode that is first of all."""
    return torch.full(tokens.mask.shape, torch.nan if 0 in tokens.trajectory else 1.0)


async def test_a_step_by_weights_that_are_none_is_left_out_and_the_next_one_taken():
    selection = {"kind": "custom", "function": f"{__name__}:endless_for_the_first_group"}
    settings = resolve_preset("grpo", {"minibatches": 2, "selection": selection})
    weights, metrics = await updated(settings, "trajectory")
    assert (metrics["policy/skipped_steps"], metrics["policy/optimizer_steps"]) == (1.0, 1.0)
    before = dict(sharp_model().named_parameters())
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert not list(not_finite(weights))


ENDLESS = {"kind": "custom", "function": f"{__name__}:endless_for_the_first_group"}


async def test_a_critic_learns_also_where_no_step_of_the_policy_is_taken():
    settings = resolve_preset("ppo", {"minibatches": 2, "selection": ENDLESS})
    _, metrics = await updated(settings, "trajectory")
    assert (metrics["policy/skipped_steps"], metrics["policy/optimizer_steps"]) == (1.0, 1.0)
    assert (metrics["critic/skipped_steps"], metrics["critic/optimizer_steps"]) == (0.0, 2.0)


@pytest.mark.parametrize("seed", range(4))
async def test_a_fault_in_whichever_minibatch_leaves_the_mismatch_reported(seed):
    """Among these seeds the first episode is in the first minibatch, and in the second."""
    settings = resolve_preset("grpo", {"minibatches": 2, "selection": ENDLESS})
    batch = episode_batch(groups_for_all(), row_builder("trajectory"))
    metrics = await Learner(settings, models_of(settings), seed=seed).update(batch, step=0)
    assert metrics["policy/skipped_steps"] == 1.0
    assert metrics["mismatch/k3"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
async def test_a_step_that_is_not_finite_leaves_the_mismatch_of_the_other_reported(seed):
    settings = resolve_preset("grpo", {"minibatches": 2, "proximal": "behaviour"})
    batch = episode_batch(with_a_nan_at_sampling(groups_for_all()), row_builder("trajectory"))
    metrics = await Learner(settings, models_of(settings), seed=seed).update(batch, step=0)
    assert (metrics["policy/skipped_steps"], metrics["policy/optimizer_steps"]) == (1.0, 1.0)
    assert metrics["mismatch/k3"] == pytest.approx(0.0, abs=1e-6)
