"""Experts that the old policy's forward took are taken by the steps of the update: ratios compare one network."""

from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from tests.support.megatron_ranks import family_model
from tests.support.played_groups import played_groups
from tests.support.routed_rows import routers, rows
from tests.support.tiny_models import sharp_model


def undecided_model():
    """A mixture three of whose four experts are equal to its routers: rounding decides which two it takes."""
    model = family_model("qwen3_moe")
    with torch.no_grad():
        for router in routers(model):
            router.weight[1:3] = router.weight[0]
            router.weight[3] = -router.weight[0]
    return model


def add_rounding(model):
    """Have routers read what sums in another order would give: other last bits in each forward."""
    draws = torch.Generator().manual_seed(0)

    def rounded(_, inputs):
        (hidden,) = inputs
        return (hidden * (1 + 1e-6 * torch.randn(hidden.shape, generator=draws)),)

    def decide(router, inputs, output):
        logits, _, chosen = output
        bits = logits + 1e-6 * torch.randn(logits.shape, generator=draws)
        taken = bits.topk(chosen.shape[-1], dim=-1).indices
        scores = logits.softmax(-1).gather(-1, taken)
        return logits, scores / scores.sum(-1, keepdim=True), taken

    for router in routers(model):
        router.register_forward_pre_hook(rounded)
        router.register_forward_hook(decide, prepend=True)  # before the experts are replaced


class Watched(TorchBackend):
    """Notes what each step is given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.given = []

    def step(self, rows, loss, **asked):
        self.given.append(list(rows))
        return super().step(rows, loss, **asked)


def policy_of(model, rate):
    optimizer = OptimizerSettings(tokens_per_micro_batch=60, gradient_clip=1e9)
    return Watched(PolicyHead(model, 1.0), optimizer, Schedule(rate, 0, 10, "constant"))


async def updated(*, router_replay, rate=0.0):
    model = undecided_model()
    groups = played_groups(model)
    add_rounding(model)
    policy = policy_of(model, rate)
    settings = resolve_preset("grpo", {"minibatches": 3, "epochs": 2})
    learner = Learner(settings, Models(policy), seed=1, router_replay=router_replay)
    metrics = await learner.update(episode_batch(groups, row_builder("step")), step=0)
    return metrics, policy


async def test_ratios_of_an_unchanged_policy_are_one_where_rounding_chooses_experts():
    free, _ = await updated(router_replay=False)
    again, _ = await updated(router_replay=True)
    assert free["policy/clip_fraction"] > 0.05, "rounding changed nothing"
    assert again["policy/clip_fraction"] == 0.0
    assert again["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert abs(free["policy/ratio"] - 1.0) > 1e-3


async def test_every_step_takes_what_the_old_policys_forward_took():
    _, policy = await updated(router_replay=True, rate=1e-3)
    assert len(policy.given) == 6
    taken = {}
    for given in policy.given:
        for row in given:
            assert row.experts.shape == (len(row.ids), 4)
            assert row.experts.min() >= 0
            name = (
                tuple(row.ids.tolist()),
                tuple(row.mask.tolist()),
                tuple(row.fields["old_logprobs"].tolist()),
            )
            taken.setdefault(name, []).append(row.experts)
    assert {len(each) for each in taken.values()} == {2}, "once in each epoch"
    assert all(torch.equal(first, second) for first, second in taken.values())


def test_experts_of_the_rollout_stay_and_the_others_are_the_routers():
    model = family_model("qwen3_moe")
    policy = policy_of(model, 0.0)
    given = rows()
    given[1].experts[2:5] = -1
    given[2] = replace(given[2], experts=None)
    outputs, experts = policy.forward_routed(given)
    for one, other in zip(outputs, policy.forward(given), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(experts[0], given[0].experts)
    assert torch.equal(experts[1][:2], given[1].experts[:2])
    assert experts[1][2:5].min() >= 0
    again = policy.forward_routed(
        [replace(row, experts=taken) for row, taken in zip(given, experts, strict=True)]
    )
    for one, other in zip([*outputs, *experts], [*again.outputs, *again.experts], strict=True):
        assert torch.equal(one, other)


def test_rows_that_begin_alike_are_each_told_their_own():
    policy = policy_of(family_model("qwen3_moe"), 0.0)
    (row, *_) = rows()
    longer = replace(
        row, ids=torch.cat([row.ids, row.ids]), mask=torch.cat([row.mask, row.mask]), experts=None
    )
    outputs, experts = policy.forward_routed([replace(row, experts=None), longer])
    assert [len(each) for each in outputs] == [len(each) for each in experts] == [6, 12]
    assert torch.equal(experts[0], experts[1][:6])


def test_a_dense_model_is_refused():
    with pytest.raises(ConfigError, match="the model has no experts whose choice can be taken again"):
        policy_of(sharp_model(), 0.0).forward_routed([replace(rows()[0], experts=None)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": {"preset": "grpo"}}, "and this algorithm computes none: set algorithm.proximal"),
        (
            {"algorithm": {"preset": "grpo", "minibatches": 2, "proximal": "behaviour"}},
            "and this algorithm computes none",
        ),
    ],
)
def test_settings_that_compare_with_no_old_policy_are_refused(changes, said):
    tasks = [{"env_id": "FrozenLake-v0"}]
    optimizer = {"router_replay": True}
    with pytest.raises(ValueError, match=said):
        RunSettings(tasks=tasks, optimizer=optimizer, **changes)
    RunSettings(tasks=tasks, optimizer=optimizer, algorithm={"preset": "grpo", "minibatches": 2})
