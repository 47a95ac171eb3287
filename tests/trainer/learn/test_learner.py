"""One update, whole: every preset learns from a batch, and the layout of the batch changes nothing."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome
from tests.support.learner_models import assert_equal_weights, groups_for_all, models_of, updated
from tests.support.played_groups import sharp_groups
from tests.support.tiny_models import sharp_model

DISTINCT = [
    *(
        "bi_level_gae",
        "clip_cov",
        "decoupled_ppo",
        "dppo",
        "dr_grpo",
        "gdpo",
        "gigpo",
        "gmpo",
        "grpo",
        "gspo",
    ),
    *(
        "high_entropy",
        "kl_cov",
        "m2po",
        "otb",
        "ppo",
        "reinforce_pp",
        "remax",
        "rloo",
        "spo",
        "starpo_s",
        "topr",
        "vapo",
        "vespo",
    ),
]
"""Presets that each take a way of their own through the learner; the others differ in formulas alone, which
tests/trainer/algorithms covers."""

_UPDATED = {}


async def updated_by(preset: str, rows: str):
    """What one update with a preset gives, found once for all that is compared with it."""
    if (preset, rows) not in _UPDATED:
        _UPDATED[preset, rows] = await updated(resolve_preset(preset, {}), rows)
    return _UPDATED[preset, rows]


@pytest.mark.parametrize(
    ("preset", "rows"),
    [*((preset, "step") for preset in sorted(PRESETS)), *((preset, "trajectory") for preset in DISTINCT)],
)
async def test_every_preset_updates(preset, rows):
    weights, metrics = await updated_by(preset, rows)
    before = dict(sharp_model().named_parameters())
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert metrics["policy/gradient_norm"] > 0
    assert metrics["policy/entropy"] > 0
    # The behaviour policy is the current one, so the first ratios are 1.
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("preset", DISTINCT)
async def test_row_layout_does_not_change_the_update(preset):
    overrides = {"aggregation": {"mode": "token-mean", "horizon": None}, "minibatches": 1}
    settings = resolve_preset(preset, overrides)
    trajectories, _ = await updated(settings, "trajectory")
    steps, _ = await updated(settings, "step")
    assert_equal_weights(trajectories, steps)


@pytest.mark.parametrize("preset", DISTINCT)
async def test_micro_batches_do_not_change_the_update(preset):
    whole, metrics = await updated_by(preset, "step")
    cut, cut_metrics = await updated(resolve_preset(preset, {}), "step", budget=20)
    assert_equal_weights(whole, cut)
    assert but_cost(cut_metrics) == pytest.approx(but_cost(metrics), abs=1e-4, rel=1e-3)


class Sent(TorchBackend):
    """A backend whose losses come from another process."""

    def step(self, rows, loss, **asked):
        return super().step(rows, pickle.loads(pickle.dumps(loss)), **asked)


@pytest.mark.parametrize("preset", ["ppo", "grpo", "gigpo"])
async def test_a_loss_does_the_same_in_another_process(preset):
    settings = resolve_preset(preset, {})
    here, metrics = await updated(settings, "step")
    there, sent_metrics = await updated(settings, "step", backend=Sent)
    assert sent_metrics == metrics
    assert "mismatch/k3" in metrics
    for name, tensor in here.items():
        assert torch.equal(there[name], tensor), name


class Seen(TorchBackend):
    """A backend that keeps the types of the numbers that losses read."""

    def step(self, rows, loss, **asked):
        self.types = []

        def seen(micro):
            self.types.append({name: values.dtype for name, values in micro.fields.items()})
            return loss(micro)

        return super().step(rows, seen, **asked)


@pytest.mark.parametrize("preset", ["ppo", "high_entropy"])
async def test_turns_are_whole_numbers_as_far_as_the_loss(preset):
    settings = resolve_preset(preset, {})
    models = models_of(settings, budget=20, backend=Seen)
    await Learner(settings, models, seed=1).update(
        episode_batch(groups_for_all(), row_builder("step")), step=0
    )
    assert models.policy.types
    for types in models.policy.types:
        assert types.pop("turn_index") == torch.int64
        assert set(types.values()) == {torch.float32}


async def test_an_update_without_rows_is_none():
    settings = resolve_preset("grpo", {})
    models = models_of(settings)
    batch = episode_batch([], row_builder("step"))
    assert await Learner(settings, models, seed=0).update(batch, 0) == {"batch/rows": 0.0}
    assert_equal_weights(dict(sharp_model().named_parameters()), dict(models.policy.export()))


async def test_the_learning_rate_that_is_told_is_the_one_that_was_used():
    settings = resolve_preset("grpo", {})
    optimizer = OptimizerSettings(tokens_per_micro_batch=10_000)
    backend = TorchBackend(PolicyHead(sharp_model(), 1.0), optimizer, Schedule(1e-3, 2, 6, "linear"))
    learner = Learner(settings, Models(backend, None, None), seed=1)
    told = [
        (await learner.update(episode_batch(groups_for_all(), row_builder("step")), step))[
            "policy/learning_rate"
        ]
        for step in range(4)
    ]
    assert told == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.75e-3])


async def test_groups_of_equal_returns_give_no_gradient():
    settings = resolve_preset("grpo", {})
    models = models_of(settings)
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                turn.reward = 0.0
    metrics = await Learner(settings, models, seed=0).update(episode_batch(groups, row_builder("step")), 0)
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
async def test_mismatch_is_reported_whether_old_logprobs_are_computed_or_not(overrides):
    _, metrics = await updated(resolve_preset("grpo", overrides), "trajectory")
    assert metrics["mismatch/k3"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch/weight_ess"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("rows", ["trajectory", "step"])
async def test_the_records_say_with_which_advantages_they_were_trained(rows):
    groups = sharp_groups()
    settings = resolve_preset("grpo", {})
    batch = episode_batch(groups, row_builder(rows))
    await Learner(settings, models_of(settings), seed=1).update(batch, step=0)
    for group in groups:
        scores = [trajectory.total_reward for trajectory in group.trajectories]
        mean, deviation = np.mean(scores), np.std(scores, ddof=1)
        for trajectory, score in zip(group.trajectories, scores, strict=True):
            for turn in trajectory.turns:
                expected = [(score - mean) / (deviation + 1e-6)] * (turn.end - turn.start)
                assert turn.advantages == pytest.approx(expected, abs=1e-5)
    record = json.loads(json.dumps(groups[0].trajectories[0].as_record()))
    assert Trajectory.from_record(record) == groups[0].trajectories[0]
    assert len(record["turns"][0]["advantages"]) == 1, "GRPO gives all tokens of a reply one number"


async def test_the_mismatch_is_told_for_each_domain():
    groups = sharp_groups()
    for group in groups:
        group.task = replace(group.task, domain="far" if group.index == 1 else "near")
        for trajectory in group.trajectories:
            trajectory.task = group.task
            if group.index == 1:
                for segment in trajectory.segments:
                    segment.behaviour_logprobs = [
                        value - 0.5 if value else 0.0 for value in segment.behaviour_logprobs
                    ]
    settings = resolve_preset("grpo", {})
    batch = episode_batch(groups, row_builder("trajectory"))
    metrics = await Learner(settings, models_of(settings, budget=20), seed=1).update(batch, step=0)
    assert metrics["domain/far/mismatch/k1"] == pytest.approx(-0.5, abs=1e-3)
    assert metrics["domain/near/mismatch/k1"] == pytest.approx(0.0, abs=1e-3)
    assert -0.5 < metrics["mismatch/k1"] < 0.0


@pytest.mark.parametrize("rows", ["trajectory", "step"])
async def test_structured_outputs_are_no_mismatch(rows):
    """Their log-probabilities are of a part of the vocabulary, so they say nothing of the two engines."""
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            for number, turn in enumerate(trajectory.turns):
                turn.structured = number % 2 == 1
                if turn.structured:
                    own = trajectory.segments[turn.segment].behaviour_logprobs
                    own[turn.start : turn.end] = [value / 2 for value in own[turn.start : turn.end]]
    settings = resolve_preset("grpo", {})
    batch = episode_batch(groups, row_builder(rows))
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch, step=0)
    assert metrics["mismatch/k1"] == pytest.approx(0.0, abs=1e-4)
    for trajectory in batch.trajectories:
        for turn in trajectory.turns:
            turn.structured = True
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch, step=0)
    assert not [name for name in metrics if "mismatch" in name]


async def test_the_mismatch_is_told_by_how_far_tokens_are_behind():
    """Tokens of the trained version agree with the engine; each update more costs half a nat here."""
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                lags = [place % 4 for place in range(len(segment.ids))]
                segment.behaviour_logprobs = [
                    value - 0.5 * lag if value else 0.0
                    for value, lag in zip(segment.behaviour_logprobs, lags, strict=True)
                ]
                segment.versions = [
                    7 - lag if used else -1 for used, lag in zip(segment.action_mask, lags, strict=True)
                ]
    settings = resolve_preset("grpo", {"proximal": "behaviour"})
    batch = episode_batch(groups, row_builder("trajectory"))
    metrics = await Learner(settings, models_of(settings, budget=20), seed=1).update(batch, step=3, version=7)
    assert metrics["lag_0/mismatch/k1"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["lag_1/mismatch/k1"] == pytest.approx(-0.5, abs=1e-3)
    assert -1.5 < metrics["lag_2_up/mismatch/k1"] < -1.0
    _, fresh = await updated(settings, "trajectory")
    assert not [name for name in fresh if name.startswith("lag_")], "all tokens are of the trained version"


@pytest.mark.parametrize("overrides", [{"proximal": "behaviour"}, {"minibatches": 2, "epochs": 2}])
async def test_a_ratio_of_sequences_is_the_same_however_episodes_are_cut_into_rows(overrides):
    """Rows of one episode lie in several micro-batches, and the policy has moved since they were sampled."""
    settings = resolve_preset(
        "gspo",
        {
            "aggregation": {"mode": "token-mean"},
            "surrogate": {"clip_low": 0.005, "clip_high": 0.005},
            **overrides,
        },
    )

    def groups():
        played = sharp_groups()
        for group in played:
            for trajectory in group.trajectories:
                for segment in trajectory.segments:
                    segment.behaviour_logprobs = [
                        value + 0.02 * (place % 7 - 3) if value else 0.0
                        for place, value in enumerate(segment.behaviour_logprobs)
                    ]
        return played

    results = []
    for layout, budget in (("trajectory", 10_000), ("step", 10_000), ("step", 20)):
        models = models_of(settings, budget)
        batch = episode_batch(groups(), row_builder(layout))
        metrics = await Learner(settings, models, seed=1).update(batch, step=0)
        results.append((dict(models.policy.export()), metrics))
    (whole, metrics), *others = results
    assert 0.0 < metrics["policy/clip_fraction"] < 1.0
    for weights, numbers in others:
        assert_equal_weights(whole, weights)
        for name in ("policy/clip_fraction", "policy/ratio", "loss/policy"):
            assert numbers[name] == pytest.approx(metrics[name], abs=1e-4), name


async def test_an_engine_that_computes_other_logprobs_shows_in_the_mismatch():
    settings = resolve_preset("grpo", {})
    groups = sharp_groups()
    for group in groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                segment.behaviour_logprobs = [
                    value - 0.5 if value else 0.0 for value in segment.behaviour_logprobs
                ]
    batch = episode_batch(groups, row_builder("trajectory"))
    metrics = await Learner(settings, models_of(settings), seed=1).update(batch, step=0)
    assert metrics["mismatch/k1"] == pytest.approx(-0.5, abs=1e-3)
    assert metrics["mismatch/weight_mean"] == pytest.approx(np.exp(0.5), abs=1e-2)
    truncated = await Learner(settings, models_of(settings), seed=1, truncated=True).update(batch, step=0)
    assert not [name for name in truncated if name.startswith("mismatch/")], (
        "two distributions, no comparison"
    )


def cut_in_two(groups: list[Group]) -> list[Group]:
    """The same episodes, recorded in two segments each: the second begins with all that the first held."""
    for trajectory in (each for group in groups for each in group.trajectories):
        (whole,) = trajectory.segments
        if len(trajectory.turns) > 1:
            end = trajectory.turns[0].end
            first = Segment(*(values[:end] for values in segment_lists(whole)))
            second = Segment(*(list(values) for values in segment_lists(whole)), parent=(0, end))
            second.action_mask[:end] = [False] * end
            second.behaviour_logprobs[:end] = [0.0] * end
            second.turn_index[:end] = [-1] * end
            trajectory.segments = [first, second]
            for turn in trajectory.turns[1:]:
                turn.segment = 1
    return groups


def but_cost(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without what the cut alone decides: how many tokens rows of a micro-batch share."""
    return {name: value for name, value in metrics.items() if not name.endswith("/shared_prefixes")}


def segment_lists(segment: Segment) -> tuple[list, ...]:
    return segment.ids, segment.action_mask, segment.behaviour_logprobs, segment.versions, segment.turn_index


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("preset", DISTINCT)
async def test_an_episode_in_several_segments_has_one_credit_however_it_is_cut(preset, minibatches):
    """Each token is read after the same context in both, so the update is the same, in every way to average."""
    if minibatches > 1 and PRESETS[preset].surrogate.kind == "reinforce":
        pytest.skip("a policy gradient without a ratio takes one step")
    settings = resolve_preset(preset, {"minibatches": minibatches})
    results = []
    for groups in (groups_for_all(), cut_in_two(groups_for_all())):
        models = models_of(settings)
        batch = episode_batch(groups, row_builder("trajectory"))
        metrics = await Learner(settings, models, seed=1).update(batch, step=0)
        results.append((dict(models.policy.export()), metrics))
    (whole, metrics), (cut, cut_metrics) = results
    assert cut_metrics.pop("batch/rows") > metrics.pop("batch/rows")
    assert_equal_weights(whole, cut)
    assert but_cost(cut_metrics) == pytest.approx(but_cost(metrics), abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("preset", ["ppo", "grpo", "otb"])
@pytest.mark.parametrize(
    "episodes", [{"kind": "shortest", "size": 2}, {"kind": "finished", "in_statistics": False}]
)
async def test_an_update_without_the_longest_episode_is_one_of_the_others(preset, episodes):
    """What is read of each token is as wide as the rows that are left."""
    kl = {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}
    settings = resolve_preset(preset, {"episodes": episodes, "kl": kl, "minibatches": 1})
    groups = groups_for_all()
    episodes_of = [trajectory for group in groups for trajectory in group.trajectories]
    longest = max(episodes_of, key=lambda each: len(each.segments[0].ids))
    longest.outcome = TrajectoryOutcome.TRUNCATED
    models = models_of(settings)
    batch = episode_batch(groups, row_builder("trajectory"))
    metrics = await Learner(settings, models, seed=1).update(batch, step=0)
    assert metrics["batch/episodes_left_out"] >= 1
    kept = [group_without(group, longest, episodes) for group in groups]
    alone = models_of(settings)
    await Learner(resolve_preset(preset, {"kl": kl, "minibatches": 1}), alone, seed=1).update(
        episode_batch(kept, row_builder("trajectory")), step=0
    )
    assert_equal_weights(dict(models.policy.export()), dict(alone.policy.export()))


def group_without(group, longest, episodes):
    """What is left of a group where some episodes are not trained on."""
    left = [each for each in group.trajectories if each is not longest]
    if episodes["kind"] == "shortest":
        left = sorted(group.trajectories, key=lambda each: each.action_tokens)[: episodes["size"]]
        left.sort(key=lambda each: each.member)
    return replace(group, trajectories=left)


async def test_nothing_is_charged_for_moves_before_the_first_step():
    """Log-probabilities of two forward passes differ by rounding, whose sign would be a gradient."""
    selection = {"kind": "kl_cov", "fraction": 1.0}
    charged = resolve_preset("grpo", {"minibatches": 3, "selection": selection})
    whole, _ = await updated(charged, "trajectory")
    cut, _ = await updated(charged, "trajectory", budget=20)
    assert_equal_weights(whole, cut)
    free, _ = await updated(resolve_preset("grpo", {"minibatches": 3}), "trajectory")
    assert any(not torch.allclose(whole[name], free[name], atol=2e-5, rtol=2e-3) for name in whole)
