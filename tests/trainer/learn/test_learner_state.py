"""What an update remembers for the next, and which episodes and tokens it leaves out."""

import math
from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.state import AlgorithmState
from rollgym.trainer.learn.batches import episode_batch, row_builder, task_key
from rollgym.trainer.learn.learner import Learner
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from tests.support.learner_models import assert_equal_weights, groups_for_all, models_of
from tests.support.played_groups import sharp_groups
from tests.support.tiny_models import sharp_model


def batch_of(groups=None, rows="trajectory"):
    return episode_batch(groups or groups_for_all(), row_builder(rows))


async def test_an_adaptive_coefficient_goes_on_from_a_checkpoint(tmp_path):
    kl = {"coefficient": 0.5, "estimator": "k3", "target": 1e-6, "horizon": 100}
    settings = resolve_preset("grpo", {"kl": kl, "minibatches": 2})
    models = models_of(settings)
    learner = Learner(settings, models, seed=1)
    coefficients = [(await learner.update(batch_of(), step))["policy/kl_coefficient"] for step in range(3)]
    episodes = len(batch_of().trajectories)
    grown = 1 + 0.2 * episodes / 100
    assert coefficients == pytest.approx([0.5, 0.5 * grown, 0.5 * grown**2])

    store = CheckpointStore(tmp_path, keep=1)
    store.save(RunState(3, 3, 0, ()), models.state_dicts())
    resumed = models_of(settings)
    resumed.load_state_dicts(store.load_newest(lambda _: None).parts)
    assert resumed.memory.state == models.memory.state
    there = await Learner(settings, resumed, seed=1).update(batch_of(), 3)
    here = await learner.update(batch_of(), 3)
    assert there["policy/kl_coefficient"] == here["policy/kl_coefficient"] == pytest.approx(0.5 * grown**3)
    assert_equal_weights(dict(models.policy.export()), dict(resumed.policy.export()))


async def test_running_moments_are_of_all_steps():
    settings = resolve_preset("grpo", {"reward": {"normalise": "running", "normalise_mean": True}})
    models = models_of(settings)
    learner = Learner(settings, models, seed=1)
    batch = batch_of()
    for step in range(2):
        await learner.update(batch, step)
    returns = [trajectory.total_reward for trajectory in batch.trajectories] * 2
    moments = models.memory.state.returns
    assert moments.count == len(returns)
    assert moments.mean == pytest.approx(sum(returns) / len(returns))


async def test_moving_baselines_are_of_all_steps():
    settings = resolve_preset("rae", {})
    models = models_of(settings)
    learner = Learner(settings, models, seed=1)
    batch = batch_of()
    for step in range(2):
        await learner.update(batch, step)
    expected = 0.0
    for trajectory in batch.trajectories * 2:
        expected = 0.95 * expected + 0.05 * trajectory.total_reward
    assert dict(models.memory.state.baselines) == pytest.approx({"": expected})


async def test_spo_remembers_tasks_by_what_they_are():
    settings = resolve_preset("spo", {})
    models = models_of(settings)
    learner = Learner(settings, models, seed=1)
    metrics = await learner.update(batch_of(), 0)
    assert metrics["policy/moved"] > 0
    groups = groups_for_all()
    assert set(models.memory.state.worths) == {task_key(group.task) for group in groups}
    again = replace(groups[0].task, index=77)
    assert task_key(again) == task_key(groups[0].task), "wherever in the stream it is"
    assert task_key(replace(again, seed=78)) != task_key(again)


async def test_nothing_is_remembered_where_nothing_reads_it():
    models = models_of(resolve_preset("grpo", {}))
    await Learner(resolve_preset("grpo", {}), models, seed=1).update(batch_of(), 0)
    assert models.memory.state == AlgorithmState()
    assert "algorithm" not in models.state_dicts()


async def test_episodes_that_were_cut_off_give_statistics_and_no_gradient():
    settings = resolve_preset("grpo", {"episodes": {"kind": "finished"}, "advantage": {"scale": "none"}})
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.outcome = TrajectoryOutcome.SOLVED
        group.trajectories[0].outcome = TrajectoryOutcome.TRUNCATED
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch_of(groups), 0)
    assert metrics["batch/episodes_left_out"] == len(groups)
    for group in groups:
        mean = sum(each.total_reward for each in group.trajectories) / len(group.trajectories)
        assert all(not turn.advantages for turn in group.trajectories[0].turns)
        for trajectory in group.trajectories[1:]:
            for turn in trajectory.turns:
                assert turn.advantages == pytest.approx(
                    [trajectory.total_reward - mean] * len(turn.advantages), abs=1e-6
                )


async def test_episodes_that_are_resampled_away_are_as_if_never_played():
    overrides = {"advantage": {"scale": "none"}, "minibatches": 1}
    chosen = {"episodes": {"kind": "resample_on_correct", "size": 2}}
    settings = resolve_preset("grpo", {**overrides, **chosen})
    groups = sharp_groups()
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch_of(groups), 0)
    trained = [t for group in groups for t in group.trajectories if any(turn.advantages for turn in t.turns)]
    assert len(trained) == 2 * len(groups)
    assert metrics["batch/episodes_left_out"] == sum(len(group.trajectories) - 2 for group in groups)
    for group in groups:
        group.trajectories = [each for each in group.trajectories if each in trained]
    plain = resolve_preset("grpo", overrides)
    alone, left = models_of(plain), models_of(settings)
    await Learner(plain, alone, seed=1).update(batch_of(groups), 0)
    await Learner(settings, left, seed=1).update(batch_of(groups), 0)
    assert_equal_weights(dict(alone.policy.export()), dict(left.policy.export()))


async def test_all_episodes_left_out_is_no_update():
    settings = resolve_preset("grpo", {"episodes": {"kind": "finished"}})
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.outcome = TrajectoryOutcome.TRUNCATED
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch_of(groups), 0)
    assert metrics == {
        "batch/rows": 0.0,
        "batch/episodes_left_out": float(len(batch_of(groups).trajectories)),
    }


async def test_tokens_that_are_selected_say_so_in_the_metrics():
    settings = resolve_preset("high_entropy", {"minibatches": 2, "selection": {"fraction": 0.5}})
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch_of(), 0)
    assert 0.4 < metrics["selection/kept"] < 0.8
    assert metrics["policy/gradient_norm"] > 0


async def test_a_rejection_of_all_gives_no_gradient():
    settings = resolve_preset(
        "grpo",
        {"correction": {"kind": "reject", "reject": [{"level": "sequence", "measure": "k1", "low": 5.0}]}},
    )
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch_of(), 0)
    assert metrics["correction/kept"] == 0.0
    assert metrics["policy/gradient_norm"] == 0.0


async def test_interpolated_log_probabilities_lie_between_sampling_and_now():
    """Tokens of the trained version have the share 0, so that ratios start from what was recorded."""
    results = []
    for proximal in ("interpolated", "behaviour"):
        settings = resolve_preset("grpo", {"proximal": proximal, "minibatches": 2})
        models = models_of(settings)
        await Learner(settings, models, seed=1).update(batch_of(), 0, version=0)
        results.append(dict(models.policy.export()))
    assert_equal_weights(*results)


def test_entropies_are_those_of_the_loss():
    models = models_of(resolve_preset("grpo", {}), budget=20)
    batch = batch_of()
    rows = [row.tensors() for row in batch.rows]
    entropies = models.policy.entropies(rows)
    # Of order two: at most the first, and at least what the most likely token alone makes of it.
    collisions = models.policy.entropies(rows, "collision")
    model = sharp_model()
    for row, line in zip(rows, collisions, strict=True):
        logits = model(input_ids=row.ids[None]).logits[0, :-1].double()
        expected = -logits.softmax(-1).square().sum(-1).log()
        torch.testing.assert_close(
            line[1:][row.mask[1:]].double(), expected[row.mask[1:]], atol=1e-5, rtol=1e-5
        )
    assert all((line[row.mask] > 0).all() for line, row in zip(entropies, rows, strict=True))
    assert all(not line[~row.mask].any() for line, row in zip(entropies, rows, strict=True))


def test_normalised_rewards_scale_what_a_critic_learns():
    settings = resolve_preset("reinforce", {"reward": {"normalise": "batch", "normalise_mean": True}})
    batch = batch_of()
    turn_index = torch.zeros(batch.mask.shape).long()
    for at, row in enumerate(batch.rows):
        turn_index[at, : len(row.turn_index)] = torch.tensor(row.turn_index)
    from rollgym.trainer.algorithms.batch import RowBatch

    rows = RowBatch(torch.tensor([row.trajectory for row in batch.rows]), batch.mask, turn_index)
    found = compute_advantages(settings, batch.episodes, rows).advantages
    returns = torch.tensor([each.total_reward for each in batch.trajectories], dtype=torch.float64)
    expected = (returns - returns.mean()) / (returns.std() + 1e-6)
    for at, row in enumerate(batch.rows):
        first = int(batch.mask[at].nonzero()[0])
        assert found[at, first].item() == pytest.approx(float(expected[row.trajectory]), abs=1e-5)
    assert not math.isnan(float(found.sum()))
