"""Two ranks train a model as one process does: same losses, gradients and weights, whatever divides it."""

import copy
import hashlib
import math
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from tests.support.played_groups import played_groups
from tests.support.rank_recipes import Recipe, head_of, not_finite_at
from tests.support.sharing_ranks import SharingRecipe
from tests.support.tiny_models import sharp_model
from trainer.algorithms.aggregation import Denominators
from trainer.algorithms.metrics import collect
from trainer.algorithms.presets import resolve_preset
from trainer.backends.base import TrainRow
from trainer.backends.local_ranks import LocalRanks
from trainer.backends.optimizer import Schedule
from trainer.backends.rank_group import MeshShape
from trainer.backends.ranked import RankedBackend, Ranks
from trainer.backends.reference import FrozenModel
from trainer.backends.torch_backend import TorchBackend
from trainer.config.optimizer import OptimizerSettings
from trainer.learn.batches import episode_batch
from trainer.learn.learner import Learner, Models
from trainer.learn.rows import row_builder
from trainer.models.load import load_model
from trainer.pipelines.sft import _negative_log_likelihood
from trainer.records.checkpoint import CheckpointStore, RunState
from trainer.records.pieces import SavedPieces

WIDTH = 16
TOKENS = 120
GRADIENT_RATE = 2.0**10
"""At such a rate a step is much larger than the weights, which then are the gradient, as exact as it is itself."""

DEVICE = "auto" if torch.accelerator.device_count() >= 2 else "cpu"
"""Where there are accelerators for two ranks, they compute, and are compared with the processor."""

PRESETS = {
    "ppo": resolve_preset("ppo", {"minibatches": 1, "epochs": 1}),
    "grpo": resolve_preset("grpo", {"minibatches": 1, "epochs": 1, "kl": {"coefficient": 0.05}}),
    "gigpo": resolve_preset("gigpo", {"minibatches": 1, "epochs": 1}),
}
MESHES = {"data": MeshShape(data=2), "tensor": MeshShape(tensor=2), "both": MeshShape(data=2, tensor=2)}


@pytest.fixture(scope="module", params=["data", "tensor", pytest.param("both", marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    started = Ranks(LocalRanks(tmp_path_factory.mktemp("ranks")), MESHES[request.param], DEVICE, 120.0)
    started.start()
    yield started
    started.close()


def settings_of(**changes) -> OptimizerSettings:
    return OptimizerSettings(**{"tokens_per_micro_batch": TOKENS, "gradient_clip": 1e9, **changes})


class Made:
    """Models that learn the same, here and in ranks.

    Args:
        ranks: The ranks; None for models in this process.
        kind: What divides them.
        in_pieces: Whether the ranks write checkpoints themselves.
    """

    def __init__(self, ranks, kind, optimizer, rate, *, in_pieces=False, **options):
        self._in_pieces = in_pieces
        self._ranks, self._kind, self._optimizer, self._rate = ranks, kind, optimizer, rate
        self._options = options

    def backend(self, role):
        if self._ranks is not None:
            recipe = Recipe(self._kind, role, self._optimizer, self._rate, self._options)
            return RankedBackend(self._ranks, role, recipe, WIDTH, in_pieces=self._in_pieces)
        if role == "reference":
            return FrozenModel(head_of(role), TOKENS)
        schedule = Schedule(self._rate, 0, 1, "constant")
        options = {name: value for name, value in self._options.items() if name != "cpu_offload"}
        return TorchBackend(head_of(role), self._optimizer, schedule, **options)

    def models(self, settings):
        critic = self.backend("critic") if settings.critic is not None else None
        reference = self.backend("reference") if settings.needs_reference else None
        return Models(self.backend("policy"), critic, reference)


def weights_of(models):
    trained = [models.policy] if models.critic is None else [models.policy, models.critic]
    return [dict(model.export()) for model in trained]


def relative(found, expected):
    """The distance of all weights (or gradients) taken together, relative to the expected ones' length."""
    assert [list(each) for each in found] == [list(each) for each in expected]
    pairs = [
        (one[name].double(), other[name].double())
        for one, other in zip(found, expected, strict=True)
        for name in one
    ]
    apart = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(apart / sum(float(other.square().sum()) for _, other in pairs))


async def trained(made, preset, steps):
    settings = PRESETS[preset]
    models = made.models(settings)
    learner = Learner(settings, models, seed=1)
    metrics = []
    for step in range(steps):
        batch = episode_batch(played_groups(sharp_model()), row_builder("step"))
        metrics.append(await learner.update(batch, step))
    return weights_of(models), metrics


def assert_equal_losses(found, expected, rel=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if name.endswith("/shared_prefixes"):
                continue  # each rank shares what its own rows begin with
            assert one[name] == pytest.approx(value, rel=rel, abs=2e-6), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    started = Ranks(LocalRanks(tmp_path_factory.mktemp("alone")), MeshShape(), DEVICE, 120.0)
    started.start()
    yield started
    started.close()


KINDS = ["fsdp2", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
async def test_losses_gradients_and_weights_are_those_of_one_process(ranks, preset, kind):
    if kind != "fsdp2" and ranks.mesh.tensor > 1:
        pytest.skip("DeepSpeed divides over data-parallel ranks only")
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
    for optimizer, rate, steps, tolerance in (
        (settings_of(kind="sgd"), GRADIENT_RATE, 1, 1e-5),
        (settings_of(kind="sgd"), 0.01, 5, 1e-6),
        (settings_of(epsilon=1e-5), 1e-3, 5, 1e-4),
    ):
        expected, metrics = await trained(Made(None, kind, optimizer, rate), preset, steps)
        found, ranked_metrics = await trained(Made(ranks, kind, optimizer, rate), preset, steps)
        assert relative(found, expected) < tolerance, (optimizer.kind, rate)
        assert_equal_losses(ranked_metrics[:1], metrics[:1])
        assert metrics[0]["policy/gradient_norm"] > 0


async def one_more(models, settings):
    learner = Learner(settings, models, seed=1)
    return await learner.update(episode_batch(played_groups(sharp_model()), row_builder("step")), 3)


def saved_and_read(models, folder):
    store = CheckpointStore(folder, keep=1)
    store.save(RunState(3, 3, 0, ()), models.state_dicts())
    return store.load_newest(print).parts


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in_pieces"])
async def test_a_run_goes_on_with_another_number_of_ranks(ranks, alone, in_pieces, tmp_path):
    settings, optimizer = PRESETS["ppo"], settings_of(epsilon=1e-5)
    saver = Made(ranks, "fsdp2", optimizer, 1e-3, in_pieces=in_pieces)
    models = saver.models(settings)
    learner = Learner(settings, models, seed=1)
    for step in range(2):
        await learner.update(episode_batch(played_groups(sharp_model()), row_builder("step")), step)
    parts = saved_and_read(models, tmp_path / "two")
    assert isinstance(parts["policy"], SavedPieces) == in_pieces
    expected = await one_more(models, settings)
    weights = weights_of(models)

    # Two ranks to one, to this process, and to two others; and from the one back to two.
    single = Made(alone, "fsdp2", optimizer, 1e-3, in_pieces=in_pieces).models(settings)
    single.load_state_dicts(parts)
    back = saved_and_read(single, tmp_path / "one")
    others = [
        single,
        Made(None, "torch", optimizer, 1e-3).models(settings),
        saver.models(settings),
        saver.models(settings),
    ]
    for number, (resumed, state) in enumerate(zip(others, (parts, parts, parts, back), strict=True)):
        resumed.load_state_dicts(copy.deepcopy(state))  # torch's optimizers train on in what they are given
        # As close as steps of Adam are on other meshes.
        assert_equal_losses([await one_more(resumed, settings)], [expected], rel=1e-4)
        assert relative(weights_of(resumed), weights) < 1e-5, number


def test_pieces_of_another_model_are_refused(tmp_path):
    # Ranks of its own: a call that fails ends them.
    ranks = Ranks(LocalRanks(tmp_path / "ranks"), MeshShape(), DEVICE, 120.0)
    ranks.start()
    try:
        policy = Made(ranks, "fsdp2", settings_of(), 1e-3, in_pieces=True).backend("policy")
        critic = Made(ranks, "fsdp2", settings_of(), 1e-3, in_pieces=True).backend("critic")
        parts = saved_and_read(Models(policy, critic), tmp_path / "saved")
        with pytest.raises(ValueError, match="its policy is of another shape"):
            Models(policy).load_state_dicts({"policy": parts["critic"]})
    finally:
        ranks.close()


def only_data(ranks):
    if ranks.mesh.tensor > 1:
        pytest.skip("the same for every mesh")


SUPERVISED = partial(_negative_log_likelihood, counts=Denominators(tokens=40, rows=8))


def some_rows():
    draws = torch.Generator().manual_seed(1)
    rows = []
    for length in (5, 9, 12, 7, 11, 3, 3, 2):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[length // 2 :] = True
        rows.append(TrainRow(torch.randint(2, 40, (length,), generator=draws), mask))
    return rows


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-6),
        ({"cpu_offload": True}, 1e-6),
        ({"dtype": torch.bfloat16}, 2e-2),
    ],
    ids=["checkpointing", "offload", "bf16"],
)
def test_options_mean_what_they_mean_in_one_process(ranks, options, tolerance):
    only_data(ranks)
    optimizer = settings_of(epsilon=1e-5)
    found, expected = (
        Made(where, "fsdp2", optimizer, 1e-3, **options).backend("policy") for where in (ranks, None)
    )
    for _ in range(3):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    assert relative([dict(found.export())], [dict(expected.export())]) < tolerance
    exported = dict(found.export())
    assert {tensor.dtype for tensor in exported.values()} == {options.get("dtype", torch.float32)}
    assert "lm_head.weight" not in exported, "the head is the embedding"
    # What is trained is in float32, whatever it is computed in.
    masters = found.state_dict()["model"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}


def test_adapters_are_trained_saved_and_switched_off(ranks, tmp_path):
    only_data(ranks)
    optimizer = settings_of(epsilon=1e-5)
    recipe = Recipe("fsdp2", "policy", optimizer, 1e-3, lora=True)
    found = RankedBackend(ranks, "policy", recipe, WIDTH)
    base = RankedBackend(ranks, "base", Recipe("fsdp2", "base", optimizer, 1e-3), WIDTH)
    expected = TorchBackend(head_of("policy", lora=True), optimizer, Schedule(1e-3, 0, 1, "constant"))
    assert found.has_adapter
    before = dict(found.export())
    for _ in range(2):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    exported = dict(found.export())
    assert relative([exported], [dict(expected.export())]) < 1e-6
    assert any(not torch.equal(exported[name], before[name]) for name in before)
    found.save_adapter(tmp_path / "ranks")
    expected.save_adapter(tmp_path / "one")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ranks", "one"))
    assert relative([one], [other]) < 1e-5
    untrained = TorchBackend(head_of("policy"), optimizer, Schedule(1e-3, 0, 1, "constant"))
    for line, plain in zip(base.forward(some_rows()), untrained.forward(some_rows()), strict=True):
        torch.testing.assert_close(line, plain, atol=1e-4, rtol=1e-4)
    base.load_state_dict(base.state_dict())


def test_what_is_saved_is_what_other_tools_load(ranks, tmp_path):
    backend = Made(ranks, "fsdp2", settings_of(), 1e-3).backend("policy")
    backend.step(some_rows(), SUPERVISED)
    backend.save(tmp_path)
    loaded = load_model(tmp_path)
    for name, tensor in backend.parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], tensor), name
    digest, again = hashlib.blake2b(), hashlib.blake2b()
    backend.digest(digest)
    backend.step(some_rows(), SUPERVISED)
    backend.digest(again)
    assert digest.digest() != again.digest()


def test_a_loss_that_is_not_finite_in_one_rank_leaves_the_step_out_in_all(ranks):
    for kind in KINDS if ranks.mesh.tensor == 1 and find_spec("deepspeed") else KINDS[:1]:
        backend = Made(ranks, kind, settings_of(epsilon=1e-5), 1e-3).backend("policy")
        before = dict(backend.export())
        broken = backend.step(some_rows(), partial(not_finite_at, row=2), keep_outputs=True)
        assert not broken.applied, kind
        assert broken.metrics == {}
        assert [len(line) for line in broken.outputs] == [len(row.ids) for row in some_rows()]
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
        assert backend.step(some_rows(), SUPERVISED).applied, "the next one is as if nothing had been"


def test_fewer_rows_than_ranks_are_no_reason_to_wait(ranks):
    backend = Made(ranks, "fsdp2", settings_of(), 1e-3).backend("policy")
    assert [len(line) for line in backend.forward(some_rows()[:1])] == [5]
    assert backend.forward([]) == []
    assert backend.step(some_rows()[:1], SUPERVISED).applied


def test_offloaded_models_go_on_where_they_were(ranks):
    only_data(ranks)
    backend = Made(ranks, "fsdp2", settings_of(epsilon=1e-5), 1e-3).backend("policy")
    backend.step(some_rows(), SUPERVISED)
    before = dict(backend.export())
    backend.offload(["parameters", "gradients", "optimizer"])
    backend.onload(["parameters", "gradients", "optimizer"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
    assert backend.step(some_rows(), SUPERVISED).applied


# Shared prefixes


def grouped_rows() -> list[TrainRow]:
    """A group of long episodes, its turns as rows, and a few rows that share nothing: ranks have unlike trees."""
    draws = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(2, 40, (count,), generator=draws)

    rows, prompt = [], tokens(12)
    for _ in range(3):
        episode = prompt
        for _ in range(2):
            episode = torch.cat([episode, tokens(7)])
            rows.append(_row(episode, 4, draws))
            episode = torch.cat([episode[:-1], tokens(1)])  # its past is rewritten
    return [*rows, *(_row(tokens(count), 3, draws) for count in (9, 14, 5))]


def _row(ids, wanted, draws):
    mask = torch.arange(len(ids)) >= len(ids) - wanted
    return TrainRow(ids, mask, {"weight": torch.randn(len(ids), generator=draws)})


def weighted(micro):
    loss = (micro.outputs * micro.fields["weight"] * micro.mask).sum() / 20
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


@pytest.mark.parametrize(
    ("kind", "budget", "checkpointing"),
    [
        ("fsdp2", 10_000, False),
        ("fsdp2", 40, False),
        ("fsdp2", 10_000, True),
        ("zero2", 40, False),
        ("zero3", 40, False),
    ],
)
def test_ranks_share_what_their_rows_begin_with(ranks, kind, budget, checkpointing):
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
        if ranks.mesh.tensor > 1:
            pytest.skip("ZeRO divides no layers")
    rows = grouped_rows()
    schedule = Schedule(GRADIENT_RATE, 0, 1, "constant")
    apart, shared = (
        settings_of(kind="sgd", tokens_per_micro_batch=budget, shared_prefixes=mode)
        for mode in ("off", "auto")
    )
    alone = TorchBackend(head_of("policy"), apart, schedule)
    recipe = SharingRecipe(kind, shared, schedule, checkpointing)
    together = RankedBackend(ranks, "policy", recipe, 16)
    shares = kind != "zero3"
    assert (together.why_not_shared is None) is shares
    for one, two in zip(together.forward(rows), alone.forward(rows), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    alone.step(rows, weighted)
    tokens = together.step(rows, weighted).tokens
    assert tokens.rows == sum(len(row.ids) for row in rows)
    assert (tokens.computed < 0.9 * tokens.rows) is shares
    assert relative([dict(together.export())], [dict(alone.export())]) < 1e-5
