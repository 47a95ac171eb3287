"""One update, whole: every preset learns from a batch, and the layout of the batch changes nothing."""

import numpy as np
import pytest
import torch

from tests.support.tiny_models import reference_logprobs, sharp_model
from trainer.algorithms.presets import PRESETS, resolve_preset
from trainer.backends.heads import PolicyHead, ValueHead
from trainer.backends.torch_backend import Schedule, TorchBackend
from trainer.batches import episode_batch
from trainer.config.run import OptimizerSettings
from trainer.learner import Learner, Models
from trainer.models.value_head import ValueModel
from trainer.records import Group, Outcome, Segment, Trajectory, Turn
from trainer.rows import row_builder
from trainer.tasks.task import Task

SCHEDULE = Schedule(1e-3, 0, 10, "constant")


def played_groups(model, groups=3, members=4, seed=0) -> list[Group]:
    """Episodes of random tokens, of unequal length, with the log-probabilities that `model` gives them."""
    draws = np.random.default_rng(seed)
    result = []
    for index in range(groups):
        task = Task(index, "Any-v0", seed=index)
        group = Group(index, task, 0)
        for member in range(members):
            trajectory = Trajectory(task, member, outcome=Outcome.FAILED)
            segment = Segment()
            for turn in range(int(draws.integers(1, 4))):
                segment.append_context(draws.integers(2, 40, 3).tolist())
                start = len(segment.ids)
                reply = draws.integers(2, 40, int(draws.integers(1, 4))).tolist()
                segment.append_action(reply, [0.0] * len(reply), [0] * len(reply), turn)
                anchor = str(draws.integers(2))
                reward = float(draws.integers(2))
                trajectory.turns.append(
                    Turn(0, start, len(segment.ids), "", "", reward=reward, anchor=anchor)
                )
            exact = [0.0, *reference_logprobs(model, segment.ids)]
            segment.logprobs = [
                value if used else 0.0 for value, used in zip(exact, segment.action_mask, strict=True)
            ]
            trajectory.segments.append(segment)
            group.trajectories.append(trajectory)
        result.append(group)
    return result


def models_of(settings, budget=10_000) -> Models:
    optimizer = OptimizerSettings(tokens_per_micro_batch=budget, gradient_clip=1e9)

    def policy():
        return TorchBackend(PolicyHead(sharp_model(), 1.0), optimizer, SCHEDULE)

    critic = None
    if settings.critic is not None:
        critic = TorchBackend(ValueHead(ValueModel(sharp_model())), optimizer, SCHEDULE)
    return Models(policy(), critic, policy() if settings.needs_reference else None)


def updated(settings, rows: str, budget=10_000):
    models = models_of(settings, budget)
    batch = episode_batch(played_groups(sharp_model()), row_builder(rows))
    metrics = Learner(settings, models, seed=1).update(batch, step=0)
    return dict(models.policy.export()), metrics


def assert_equal_weights(first, second):
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize("rows", ["trajectory", "step"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_updates_on_both_row_layouts(preset, rows):
    weights, metrics = updated(resolve_preset(preset, {}), rows)
    before = dict(sharp_model().named_parameters())
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert metrics["policy/gradient_norm"] > 0
    assert metrics["policy/entropy"] > 0
    # The behaviour policy is the current one, so the first ratios are 1.
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_row_layout_does_not_change_the_update(preset):
    overrides = {"aggregation": {"mode": "token-mean"}, "minibatches": 1}
    settings = resolve_preset(preset, overrides)
    assert_equal_weights(updated(settings, "trajectory")[0], updated(settings, "step")[0])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_micro_batches_do_not_change_the_update(preset):
    settings = resolve_preset(preset, {})
    whole, metrics = updated(settings, "step")
    cut, cut_metrics = updated(settings, "step", budget=20)
    assert_equal_weights(whole, cut)
    assert cut_metrics == pytest.approx(metrics, abs=1e-4, rel=1e-3)


def test_an_update_without_rows_is_none():
    settings = resolve_preset("grpo", {})
    models = models_of(settings)
    batch = episode_batch([], row_builder("step"))
    assert Learner(settings, models, seed=0).update(batch, 0) == {"batch/rows": 0.0}
    assert_equal_weights(dict(sharp_model().named_parameters()), dict(models.policy.export()))


def test_groups_of_equal_returns_give_no_gradient():
    settings = resolve_preset("grpo", {})
    models = models_of(settings)
    groups = played_groups(sharp_model())
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                turn.reward = 0.0
    metrics = Learner(settings, models, seed=0).update(episode_batch(groups, row_builder("step")), 0)
    assert metrics["policy/gradient_norm"] == 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"proximal": "behaviour"},
        {"proximal": "behaviour", "minibatches": 3},
        {"minibatches": 3, "epochs": 2},
    ],
)
def test_mismatch_is_reported_whether_old_logprobs_are_computed_or_not(overrides):
    _, metrics = updated(resolve_preset("grpo", overrides), "trajectory")
    assert metrics["mismatch/k3"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch/weight_ess"] == pytest.approx(1.0, abs=1e-4)


def test_an_engine_that_computes_other_logprobs_shows_in_the_mismatch():
    settings = resolve_preset("grpo", {})
    groups = played_groups(sharp_model())
    for group in groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                segment.logprobs = [value - 0.5 if value else 0.0 for value in segment.logprobs]
    batch = episode_batch(groups, row_builder("trajectory"))
    metrics = Learner(settings, models_of(settings), seed=1).update(batch, step=0)
    assert metrics["mismatch/k1"] == pytest.approx(-0.5, abs=1e-3)
    assert metrics["mismatch/weight_mean"] == pytest.approx(np.exp(0.5), abs=1e-2)
    truncated = Learner(settings, models_of(settings), seed=1, truncated=True).update(batch, step=0)
    assert not [name for name in truncated if name.startswith("mismatch/")], (
        "two distributions, no comparison"
    )
