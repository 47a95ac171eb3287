"""Model FLOPs and their part of a device's peak."""

import pytest

from rollgym.trainer.config.load import load_settings
from rollgym.trainer.learn.utilisation import (
    ACCELERATORS,
    TrainingWork,
    accelerator_named,
    forward_flops,
    training_flops,
    training_work,
    utilisation,
)
from rollgym.trainer.models.shape import KNOWN, ModelShape, tiny_config

SEVEN = ModelShape.from_config(KNOWN["Qwen/Qwen2.5-7B"])
MIXTURE = ModelShape.from_config(KNOWN["Qwen/Qwen3-30B-A3B"])
TASKS = "tasks=[{env_id: FrozenLake-v0}]"


def test_a_forward_pass_is_counted_by_hand():
    shape = ModelShape.from_config(tiny_config(hidden=4, layers=1, heads=2))
    # Attention 4 x 4 four times, feed-forward 4 x 16 three times; two tokens, of which one has 897 logits of 4 numbers;
    # pairs of tokens (1, 1), (2, 1), (2, 2), each 4 operations for each of 4 numbers of a query.
    assert forward_flops(shape, [(2, 1)]) == 2 * 2 * (64 + 192) + 2 * 4 * 897 + 3 * 4 * 4
    assert forward_flops(shape, [(2, 1), (2, 1)]) == 2 * forward_flops(shape, [(2, 1)])


def test_training_is_about_six_operations_a_weight_and_token():
    # PaLM, appendix B: 6 N a token, and attention, which is a hundredth here.
    flops = training_flops(SEVEN, [(2048, 2048)])
    weights = SEVEN.parameters.total - SEVEN.parameters.embedding
    assert flops / 2048 / (6 * weights) == pytest.approx(1.0, abs=0.03)
    assert training_flops(MIXTURE, [(512, 512)]) < 0.15 * 6 * 512 * MIXTURE.parameters.total, (
        "a tenth of it is taken"
    )


def test_every_pass_counts():
    rows = [(100, 40), (60, 60)]
    once = forward_flops(SEVEN, rows)
    assert training_flops(SEVEN, rows) == 3 * once
    assert training_flops(SEVEN, rows, scored=2, epochs=2) == 8 * once
    assert training_flops(SEVEN, rows, frozen=True) == 2 * once, "frozen weights need no gradient"
    body = forward_flops(SEVEN, [(100, 0), (60, 0)])
    assert TrainingWork(SEVEN, 0, 1, critic=True).flops(rows) == 3 * once + 4 * body


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_devices_are_known_by_the_names_that_torch_gives_them(name, peak):
    found = accelerator_named(name)
    assert found is not None
    assert found.bf16_tflops == peak


def test_what_is_not_known_has_no_peak():
    assert accelerator_named("Apple M9") is None
    assert accelerator_named("") is None
    names = [each.name for each in ACCELERATORS]
    assert all(accelerator_named(name).name == name for name in names), "none hides behind one before it"


def test_half_of_the_peak_is_a_half():
    work = TrainingWork(SEVEN, 0, 1, peak_tflops=100.0, devices=2)
    rows = [(1000, 500)]
    seconds = work.flops(rows) / 100e12
    numbers = work.metrics(rows, seconds)
    assert numbers == pytest.approx({"time/model_tflops_per_s": 100.0, "time/mfu": 0.5})
    assert work.metrics(rows, 0.0) == {}
    assert utilisation(1e12, 1.0, 100.0) == pytest.approx(0.01)


def test_a_run_says_its_operations_and_on_a_processor_no_utilisation():
    settings = load_settings(None, [TASKS, "model={device: cpu, dtype: bf16}", "algorithm=ppo"])
    work = training_work(settings, tiny_config(64, 2, 4))
    assert (work.scored, work.epochs, work.critic, work.peak_tflops) == (1, 1, True, None)
    assert list(work.metrics([(10, 5)], 1.0)) == ["time/model_tflops_per_s"]
    assert training_work(settings, {"model_type": "mamba"}) is None
