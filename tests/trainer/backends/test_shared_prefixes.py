"""Rows that share prefixes give the outputs and gradients that they give apart, for every family and preset."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollgym.trainer.algorithms.aggregation import collect, merge
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.backends import packing
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.distillation_head import Distance, DistillationHead
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.backends.reference import FrozenModel, PolicyWithoutAdapters
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.tasks.task import Task
from tests.support.current_families import FAMILIES, SHAPE, model_of
from tests.support.played_groups import with_all_that_presets_read
from tests.support.rank_recipes import numbered, numbers_as_given

# Small models compute a few tokens at little more than what a call takes: sharing would not pay, and is tested.
COSTS = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=4.0, held=0.05)
SCHEDULE = Schedule(1e-3, 0, 10, "constant")
EXACT = 1e-6


@pytest.fixture
def cheap_calls(monkeypatch):
    """Calls that cost so little that whatever saves a few tokens is shared."""

    def costs(head, setting, device):
        return COSTS if setting == "auto" else None

    monkeypatch.setattr(packing, "sharing_costs", costs)


def tree_rows(seed=0, top=50) -> list[TrainRow]:
    """Rows of every kind: turns of episodes, pasts that were rewritten, a fork, and one row twice.

    Fields are each row's own: tokens that rows share have other weights in each.
    """
    draws = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(3, top, (count,), generator=draws)

    rows = []

    def add(ids, wanted):
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[wanted] = True
        rows.append(TrainRow(ids, mask, {"weight": torch.randn(len(ids), generator=draws)}))

    for prompt in (tokens(13), tokens(16)):
        for member in range(3):
            episode = prompt
            for turn in range(3):
                start = len(episode) + 4 + member
                episode = torch.cat([episode, tokens(4 + member), tokens(3 + turn)])
                # The last member's rows train on all replies so far, which lie within what later rows begin with.
                add(episode, slice(len(prompt) if member == 2 else start, None))
                if member == 1:
                    episode = torch.cat([episode[:-2], tokens(1)])  # its past is rewritten
            if member == 0:
                add(torch.cat([episode[:-3], tokens(6)]), slice(len(prompt) + 4, None))  # it is forked
    rows.append(
        TrainRow(rows[0].ids, rows[0].mask, {"weight": torch.randn(len(rows[0].ids), generator=draws)})
    )
    return rows


def weighted(micro):
    loss = (micro.outputs * micro.fields["weight"] * micro.mask).sum() / 20
    if micro.entropy is not None:
        loss = loss + 0.3 * (micro.entropy * micro.mask).sum() / 20
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


def gradients(head, rows, costs, *, budget=10_000):
    """The gradient of a batch, its outputs by row, and its micro-batches."""
    head.zero_grad(set_to_none=True)
    forward = ForwardPass(head, budget, costs)
    buckets = forward.buckets(rows)
    outputs = {}
    for bucket in buckets:
        micro = forward.run(rows, bucket, "gradient")
        weighted(micro)[0].backward()
        outputs |= dict(zip(micro.rows.tolist(), micro.outputs.detach(), strict=True))
    flat = [each.grad.flatten().float() for each in head.parameters() if each.grad is not None]
    return torch.cat(flat), [outputs[row][: len(rows[row].ids)] for row in range(len(rows))], buckets


def error(one, two):
    return float((one - two).norm() / two.norm())


def head_of(family, kind):
    if kind == "policy":
        return PolicyHead(model_of(family), 0.8)
    critic = ValueModel(model_of(family))
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    return ValueHead(critic)


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "policy") for family in FAMILIES), ("gemma-2", "critic")]
)
def test_gradients_are_those_of_rows_apart(family, kind):
    head, rows = head_of(family, kind), tree_rows()
    assert head.why_not_shared is None
    apart, outputs, _ = gradients(head, rows, None)
    together, shared_outputs, (bucket,) = gradients(head, rows, COSTS)
    assert error(together, apart) < EXACT
    for one, two in zip(shared_outputs, outputs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    # What is compared has several levels, prefixes of unequal length in one call, and windows that end within them.
    tree = bucket.shared.tree
    chains = [tree.chain(path) for path in range(len(tree.leaves))]
    assert max(len(chain) for chain in chains) >= 3
    uneven = [{tree.segments[number].start for number in call.segments} for call in tree.calls]
    assert max(len(starts) for starts in uneven) >= 2
    assert tree.tokens < 0.6 * sum(len(row.ids) for row in rows)


@pytest.mark.parametrize("budget", [30, 90, 200])
def test_gradients_do_not_depend_on_where_trees_are_cut(budget):
    head, rows = head_of("gemma-3", "policy"), tree_rows()
    apart, _, _ = gradients(head, rows, None)
    together, _, buckets = gradients(head, rows, COSTS, budget=budget)
    assert len(buckets) > 1
    assert error(together, apart) < EXACT


@pytest.mark.parametrize("costs", [COSTS, None], ids=["shared", "apart"])
def test_whole_numbers_come_to_the_loss_as_they_are(costs):
    forward, rows = ForwardPass(head_of("qwen3", "policy"), 90, costs), numbered(tree_rows())
    buckets = forward.buckets(rows)
    assert any(bucket.shared is not None for bucket in buckets) is (costs is not None)
    found = merge(numbers_as_given(forward.run(rows, bucket, "none"))[1] for bucket in buckets)
    tokens = sum(len(row.ids) for row in rows)
    assert found == {"as_given": (tokens, tokens)}


@pytest.mark.parametrize("costs", [COSTS, None], ids=["shared", "apart"])
def test_calls_that_are_made_for_other_ranks_change_nothing(costs):
    head, rows = head_of("qwen3", "policy"), tree_rows()
    wanted, _, (bucket,) = gradients(head, rows, costs)
    head.zero_grad(set_to_none=True)
    called = []
    head.body.register_forward_hook(lambda *_: called.append(1))
    weighted(ForwardPass(head, 10_000, costs).run(rows, bucket, "gradient", bucket.calls + 3))[0].backward()
    assert len(called) == bucket.calls + 3
    flat = torch.cat([each.grad.flatten() for each in head.parameters() if each.grad is not None])
    assert error(flat, wanted) < EXACT


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_implementation_of_attention_hides_what_is_padded(attention):
    head, rows = head_of("mistral", "policy"), tree_rows()
    head.model.set_attn_implementation(attention)
    assert error(gradients(head, rows, COSTS)[0], gradients(head, rows, None)[0]) < EXACT


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
def test_gradients_with_adapters():
    model = model_of("qwen3")
    add_lora(model, LoraSettings(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    head, rows = PolicyHead(model, 1.0), tree_rows()
    assert error(gradients(head, rows, COSTS)[0], gradients(head, rows, None)[0]) < EXACT
    frozen = [
        PolicyWithoutAdapters(ForwardPass(head, 10_000, costs), warm=False).forward(rows)
        for costs in (COSTS, None)
    ]
    for one, two in zip(*frozen, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
@pytest.mark.filterwarnings("error:`gradient_checkpointing_enable`:FutureWarning")
def test_activations_that_are_computed_again_read_the_same_prefix(cheap_calls):
    rows, found = tree_rows(), []
    for mode, checkpointing in (("auto", True), ("auto", False), ("off", True)):
        head = head_of("gemma-3", "policy")
        backend = TorchBackend(head, settings_of(mode), SCHEDULE, gradient_checkpointing=checkpointing)
        found += first_gradients([backend], lambda backend=backend: backend.step(rows, weighted))
    assert torch.equal(found[0], found[1])
    assert error(found[0], found[2]) < EXACT


def test_in_bfloat16_the_error_is_that_of_rounding():
    rows, exact = tree_rows(), head_of("llama-3", "policy")
    wanted, _, _ = gradients(exact, rows, None)
    rounded = PolicyHead(model_of("llama-3").to(torch.bfloat16), 0.8)
    assert rounded.why_not_shared is None
    apart, _, _ = gradients(rounded, rows, None)
    together, _, (bucket,) = gradients(rounded, rows, COSTS)
    assert bucket.shared is not None
    assert error(together, wanted) < 1.5 * error(apart, wanted)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator here")
@pytest.mark.parametrize("family", ["qwen3", "gemma-2", "qwen3-moe"])
def test_on_an_accelerator_gradients_are_those_of_rows_apart(family):
    head, rows = head_of(family, "policy").to(torch.accelerator.current_accelerator()), tree_rows()
    assert head.why_not_shared is None
    assert error(gradients(head, rows, COSTS)[0], gradients(head, rows, None)[0]) < 1e-4


def test_outputs_without_gradient_are_shared_too():
    head, rows = head_of("granite", "policy"), tree_rows()
    for one, two in zip(
        FrozenModel(ForwardPass(head, 10_000, COSTS)).forward(rows),
        FrozenModel(ForwardPass(head, 10_000)).forward(rows),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


# Whole updates


def settings_of(mode, **more) -> OptimizerSettings:
    return OptimizerSettings(gradient_clip=1e9, shared_prefixes=mode, **more)


def first_gradients(backends, run):
    """The gradient of each backend's first optimizer step in what is run."""
    found = {}

    def take(optimizer, *_):
        each = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        found.setdefault(optimizer, torch.cat([grad.flatten() for grad in each if grad is not None]))

    for backend in backends:
        backend._optimizer.register_step_pre_hook(take)
    run()
    return [found[backend._optimizer] for backend in backends]


def played_groups() -> list[Group]:
    """Groups whose episodes begin with one prompt; turns of random tokens and rewards."""
    draws, result = np.random.default_rng(0), []
    for index in range(2):
        task, prompt = Task(index, "Any-v0", seed=index), draws.integers(3, 50, 20).tolist()
        group = Group(index, task, 0)
        for member in range(4):
            trajectory, segment = Trajectory(task, member, outcome=TrajectoryOutcome.FAILED), Segment()
            for turn in range(3):
                segment.append_context(draws.integers(3, 50, 3).tolist() if turn else prompt)
                start = len(segment.ids)
                reply = draws.integers(3, 50, 4).tolist()
                segment.append_action(reply, (-3.0 - draws.random(4)).tolist(), [0] * 4, turn)
                reward, anchor = float(draws.integers(2)), str(draws.integers(2))
                trajectory.turns.append(
                    Turn(0, start, len(segment.ids), "", "", reward=reward, anchor=anchor)
                )
            trajectory.segments.append(segment)
            group.trajectories.append(trajectory)
        result.append(group)
    return with_all_that_presets_read(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "family", "rows"),
    [
        *((preset, "qwen3", rows) for preset in sorted(PRESETS) for rows in ("step", "trajectory")),
        *(
            pytest.param(preset, family, "step", marks=pytest.mark.slow)
            for preset in sorted(PRESETS)
            for family in ("llama-3", "gemma-2")
        ),
    ],
)
def test_every_presets_gradients_are_those_without(preset, family, rows, cheap_calls):
    settings = resolve_preset(preset, {"minibatches": 1})
    batch = episode_batch(played_groups(), row_builder(rows))
    found, metrics = {}, {}
    for mode in ("auto", "off"):
        policy = TorchBackend(head_of(family, "policy"), settings_of(mode), SCHEDULE)
        critic = None
        if settings.critic is not None:
            critic = TorchBackend(head_of(family, "critic"), settings_of(mode), SCHEDULE)
        reference = TorchBackend(PolicyHead(model_of(family), 1.1), settings_of(mode), SCHEDULE)
        learner = Learner(settings, Models(policy, critic, reference), seed=0)
        backends = [policy] if critic is None else [policy, critic]

        def update(learner=learner, mode=mode):
            metrics[mode] = asyncio.run(learner.update(batch, 0))

        found[mode] = first_gradients(backends, update)
    for one, two in zip(found["auto"], found["off"], strict=True):
        assert error(one, two) < EXACT
    saved = [metrics[mode].pop("policy/shared_prefixes") for mode in ("auto", "off")]
    assert saved[0] > (0.5 if rows == "step" else 0.2)
    assert saved[1] == 0.0


def test_what_is_shared_depends_on_nothing_but_the_rows(cheap_calls):
    weights = []
    for _ in range(2):
        backend = TorchBackend(head_of("qwen3", "policy"), settings_of("auto"), SCHEDULE)
        report = backend.step(tree_rows(), weighted, entropy="gradient")
        weights.append(dict(backend.export()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert 0 < report.tokens.computed < report.tokens.rows == sum(len(row.ids) for row in tree_rows())


# Models that cannot


class Forgetful(LlamaForCausalLM):
    """A model whose layers are given no cache."""

    def __init__(self, config):
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda **given: forward(
            **(given | {"past_key_values": None, "position_ids": None})
        )


class Louder(LlamaForCausalLM):
    """A model whose logits are made of more than its last hidden states."""

    def forward(self, input_ids=None, **given):
        output = super().forward(input_ids=input_ids, **given)
        if input_ids is not None:
            output.logits = output.logits * (1.0 + input_ids[..., None] / 25.0)
        return output


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Louder(LlamaConfig(**SHAPE)), "made by its whole forward"),
        (lambda: Forgetful(LlamaConfig(**SHAPE)), "passed over the cache"),
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(
                    **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
                )
            ),
            "how long the row is",
        ),
    ],
    ids=["a head of its own", "no cache", "positions that depend on the length"],
)
def test_a_model_that_cannot_shares_whole_rows_only_and_says_so(make, reason, cheap_calls):
    head, rows = PolicyHead(make().eval(), 1.0), tree_rows()
    assert reason in head.why_not_shared
    apart, outputs, _ = gradients(head, rows, None)
    together, shared_outputs, buckets = gradients(head, rows, COSTS)
    assert error(together, apart) < EXACT
    for one, two in zip(shared_outputs, outputs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert all(call.prefix == 0 for bucket in buckets for call in bucket.shared.tree.calls)
    assert reason in TorchBackend(head, settings_of("auto"), SCHEDULE).why_not_shared
    assert TorchBackend(head, settings_of("off"), SCHEDULE).why_not_shared is None


@pytest.mark.parametrize("louder", ["student", "teacher"])
def test_a_student_is_taught_alike_where_logits_are_made_of_more(louder):
    torch.manual_seed(0)
    kinds = {"student": LlamaForCausalLM, "teacher": LlamaForCausalLM, louder: Louder}
    student, teacher = (kinds[who](LlamaConfig(**SHAPE)).eval() for who in ("student", "teacher"))
    head, rows = DistillationHead(student, [teacher], Distance("forward_kl")), tree_rows()
    apart, outputs, _ = gradients(head, rows, None)
    together, shared_outputs, buckets = gradients(head, rows, COSTS)
    assert any(bucket.shared is not None for bucket in buckets)
    assert error(together, apart) < EXACT
    for one, two in zip(shared_outputs, outputs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_layers_with_another_state_are_told():
    config = LlamaConfig(**SHAPE)
    model = LlamaForCausalLM(config).eval()
    config.layer_types = ["linear_attention", "full_attention"]
    assert "linear_attention" in PolicyHead(model, 1.0).why_not_shared
