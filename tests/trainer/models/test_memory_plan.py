"""The memory plan: sizes of models, bytes on devices, and a measurement beside the reckoning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollgym.trainer.cli import main
from rollgym.trainer.config.backend import BACKENDS
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.memory_plan import (
    GIB,
    Sharding,
    Training,
    _groups,
    activation_bytes,
    trained_need,
)
from rollgym.trainer.models.shape import KNOWN, TINY_VOCABULARY, ModelShape
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.run.memory import adapter_parameters, plan_lines, remedies
from tests.support.current_families import FAMILIES
from tests.support.memory_plans import TASKS, plan_of

TORCH, FSDP2, DEEPSPEED, MEGATRON = (each.memory for each in BACKENDS)
ROOT = Path(__file__).parents[3]
SEVEN = ModelShape.from_config(KNOWN["Qwen/Qwen2.5-7B"])
MIXTURE = ModelShape.from_config(KNOWN["Qwen/Qwen3-30B-A3B"])
COUNTED = {name: config for name, config in FAMILIES.items() if name not in ("cohere",)}


@pytest.mark.parametrize("family", sorted(COUNTED))
def test_parameters_are_those_of_the_model(family):
    config = COUNTED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config.to_dict()).parameters.total == counted


@pytest.mark.parametrize(
    ("name", "total"),
    [  # as their pages on the hub have it: "Number of Parameters", and safetensors' own count
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_known_models_have_as_many_parameters_as_on_the_hub(name, total):
    assert ModelShape.from_config(KNOWN[name]).parameters.total == total


def test_a_token_takes_a_tenth_of_a_mixture():
    assert MIXTURE.matrices_per_token == pytest.approx(2.7e9, rel=0.05), "3.3 billion with the embeddings"
    assert SEVEN.matrices_per_token == pytest.approx(6.5e9, rel=0.01), "6.53 billion without the embeddings"


def test_the_tiny_policy_has_as_many_tokens_as_the_plan_says():
    assert len(build_tiny_tokenizer()) == TINY_VOCABULARY


def test_a_family_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="type 'mamba' are not known"):
        ModelShape.from_config({"model_type": "mamba"})
    with pytest.raises(ConfigError, match="lacks a size: 'vocab_size'"):
        ModelShape.from_config({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2})


@pytest.mark.parametrize(
    ("sharding", "per_parameter"),
    [  # bf16; ZeRO section 3.1: 2 + 2 + 12 bytes a parameter, of which stage 1, 2, 3 cut 12, 14, 16
        (Sharding(TORCH), 2 + 4 + 4 + 8),
        (Sharding(FSDP2, data=8), (4 + 4 + 8) / 8),
        (Sharding(DEEPSPEED, data=8, zero_stage=1), 2 + 2 + 12 / 8),
        (Sharding(DEEPSPEED, data=8, zero_stage=2), 2 + 14 / 8),
        (Sharding(DEEPSPEED, data=8, zero_stage=3), 16 / 8),
        (Sharding(MEGATRON, data=8), 2 + 4 + 12 / 8),
        (Sharding(DEEPSPEED, data=8, zero_stage=2, offload=True), 2 + 2 / 8),
        (Sharding(DEEPSPEED, data=8, zero_stage=3, offload=True), 2 / 8),
        (Sharding(FSDP2, data=8, offload=True), 0),
    ],
)
def test_bytes_a_parameter_are_those_of_the_backends_papers(sharding, per_parameter):
    need = trained_need(SEVEN, Training(number_bytes=2), sharding)
    assert (need.lasting + need.gradients) / SEVEN.parameters.total == pytest.approx(
        per_parameter, rel=1e-3, abs=1e-3
    )


def test_plain_gradient_descent_keeps_nothing_of_a_weight():
    sgd, adamw = (
        plan_of("model.path=Qwen/Qwen2.5-0.5B", f"optimizer.kind={kind}")[0] for kind in ("sgd", "adamw")
    )
    assert sgd.parts[0].need.optimizer == 0
    assert adamw.parts[0].need.optimizer == 8 * 494_032_768


def parameters_per_device(shape: ModelShape, sharding: Sharding) -> int:
    """The parameters that a device computes with: those that tensor, pipeline and experts leave it."""
    return sum(group.held for group in _groups(shape, sharding, head=True))


def test_devices_share_what_they_can():
    whole = SEVEN.parameters.total
    assert parameters_per_device(SEVEN, Sharding(MEGATRON, tensor=4)) == pytest.approx(whole / 4, rel=1e-6)
    staged = parameters_per_device(SEVEN, Sharding(MEGATRON, pipeline=2))
    assert 0.49 < staged / whole < 0.6, "one of the embeddings lies on each end"
    assert MIXTURE.parameters.experts > 0.9 * MIXTURE.parameters.total
    alone = parameters_per_device(MIXTURE, Sharding(MEGATRON, data=8, expert=8))
    assert alone == MIXTURE.parameters.dense + MIXTURE.parameters.experts // 8
    long = Training(number_bytes=2, micro_batch_tokens=65_536)
    assert (
        activation_bytes(SEVEN, long, Sharding(MEGATRON, context=4))
        < activation_bytes(SEVEN, long, Sharding(MEGATRON)) * 0.3
    )
    assert activation_bytes(
        SEVEN, Training(2, 65_536, checkpointing=True), Sharding(TORCH)
    ) < 0.2 * activation_bytes(SEVEN, long, Sharding(TORCH))


def test_fsdp2_leaves_embeddings_and_what_lies_between_layers_whole_in_each_tensor_rank():
    ends = SEVEN.parameters.embedding + SEVEN.parameters.head
    layers = SEVEN.parameters.total - ends
    assert parameters_per_device(SEVEN, Sharding(FSDP2, tensor=4)) == layers // 4 + ends
    bf16 = Training(number_bytes=2, checkpointing=True)
    kept = SEVEN.layers * SEVEN.hidden * 2 * bf16.micro_batch_tokens
    shared, whole, divided = (
        activation_bytes(SEVEN, bf16, sharding)
        for sharding in (
            Sharding(MEGATRON, tensor=4),
            Sharding(MEGATRON, tensor=4, sequence_parallel=False),
            Sharding(FSDP2, tensor=4),
        )
    )
    assert shared < kept < min(whole, divided)
    plain = Training(number_bytes=2)
    assert activation_bytes(SEVEN, plain, Sharding(FSDP2, tensor=4)) > (
        activation_bytes(SEVEN, plain, Sharding(MEGATRON, tensor=4)) * 1.4
    )


def test_models_and_who_samples_add_up():
    plan, _ = plan_of("model.path=Qwen/Qwen2.5-0.5B", "algorithm={preset: ppo, kl: {coefficient: 0.1}}")
    names = [part.name for part in plan.parts]
    assert names == ["policy", "critic", "reference", "engine"]
    policy, critic, reference, engine = (part.need for part in plan.parts)
    assert reference.weights == 4 * 494_032_768
    assert critic.weights == policy.weights, "the head is tied to the embedding, which a critic has"
    assert engine.weights == 0, "on-policy, the engine reads the weights in training"
    assert engine.cache == 64 * 2048 * (2 * 24 * 128) * 4, "64 episodes, each as long as may be"
    ahead, _ = plan_of("model.path=Qwen/Qwen2.5-0.5B", "rollout.max_staleness=1")
    assert ahead.parts[-1].need.weights == 4 * 494_032_768
    assert ahead.parts[-1].need.cache == 2 * engine.cache


def test_servers_that_sleep_take_turns_with_training():
    words = ["model={path: Qwen/Qwen2.5-1.5B, dtype: bf16, gradient_checkpointing: true}"]
    awake, _ = plan_of(*words, "inference={kind: vllm, launch: {}}")
    asleep, _ = plan_of(*words, "inference={kind: vllm, launch: {}, sleep_level: 1}")
    apart, _ = plan_of(*words, "inference={kind: vllm, launch: {devices: ['1']}}")
    assert not awake.fits
    assert awake.peak > asleep.peak > apart.peak
    assert apart.fits
    assert apart.peak_alone == int(0.9 * 80e9) + GIB


OTHERS = ["backend={kind: fsdp2, ranks: 8}", "algorithm={preset: ppo, kl: {coefficient: 0.1}}"]
OTHERS += ["model.path=Qwen/Qwen2.5-0.5B", "cluster.kind=ray"]


def test_a_model_in_ranks_of_its_own_is_divided_over_these():
    beside, _ = plan_of(*OTHERS)
    apart, _ = plan_of(*OTHERS, "cluster.roles={critic: {devices: [8, 9]}, reference: {devices: [10]}}")
    assert [part.alone for part in apart.parts] == [False, True, True, False]
    for number, ranks in ((1, 2), (2, 1)):
        held, divided = apart.parts[number].need.weights, beside.parts[number].need.weights
        assert held == pytest.approx(divided * 8 / ranks, rel=1e-6)


def test_models_that_share_other_devices_than_the_policys_add_up_there():
    one, _ = plan_of(*OTHERS, "cluster.roles={critic: {devices: [8, 9]}, reference: {devices: [10]}}")
    both, _ = plan_of(*OTHERS, "cluster.roles={critic: {devices: [8, 9]}, reference: {devices: [9]}}")
    critic, reference = (part.need for part in both.parts[1:3])
    assert one.peak_alone == critic.lasting + critic.moment + GIB
    assert both.peak_alone == one.peak_alone + reference.lasting


def test_an_engine_that_is_in_the_runs_own_process_is_where_that_trains():
    roles = "cluster.roles.actor_inference.devices=[8, 9]"
    cluster, _ = plan_of(*OTHERS, roles)
    local, _ = plan_of(*OTHERS, roles, "cluster.kind=local")
    assert cluster.parts[-1].alone
    assert not local.parts[-1].alone
    assert local.peak == cluster.peak + local.parts[-1].need.lasting


def test_what_does_not_fit_is_named_with_what_makes_it_fit():
    plan, settings = plan_of("model.path=Qwen/Qwen2.5-7B", "model.dtype=bf16")
    assert not plan.fits
    found = remedies(settings, SEVEN, plan.device_bytes)
    assert found[-1].fits
    assert [remedy.peak for remedy in found] == sorted((remedy.peak for remedy in found), reverse=True)
    lines = plan_lines(settings, 80.0)
    assert any("DOES NOT FIT; largest: policy," in line for line in " ".join(lines).split("\n"))
    assert any(line.startswith("+ model.lora={}") and line.endswith("fits") for line in lines)
    assert max(map(len, lines)) <= 78


def test_adapters_are_counted_as_peft_makes_them():
    shape = ModelShape.from_config(FAMILIES["llama-3"].to_dict())
    # Two layers of 32 wide, one head of keys of 16, feed-forward 64: in + out of each matrix, times the rank.
    by_layer = {
        "q_proj": 64,
        "k_proj": 48,
        "v_proj": 48,
        "o_proj": 64,
        "gate_proj": 96,
        "up_proj": 96,
        "down_proj": 96,
    }
    assert adapter_parameters(shape, LoraSettings(rank=4)) == 2 * 4 * sum(by_layer.values())
    assert adapter_parameters(shape, LoraSettings(rank=4, target_modules=["q_proj"])) == 2 * 4 * 64


def test_a_dry_run_prints_the_plan_behind_settings_that_can_be_read_back(capsys, tmp_path):
    words = [TASKS, "model.path=Qwen/Qwen2.5-0.5B", "model.max_length=2048"]
    assert main(["--dry-run", "--device-memory", "24", *words]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    assert load_settings(file) == load_settings(None, words)
    plan = [line for line in printed.splitlines() if line.startswith("#")]
    assert max(map(len, plan)) <= 80
    del plan[: next(place for place, line in enumerate(plan) if "memory plan" in line)]
    assert plan[0] == "# memory plan: Qwen/Qwen2.5-0.5B, 0.49 billion parameters"
    assert "24 GB" in plan[1]
    assert not any("assumed" in line for line in plan)


def test_a_plan_for_a_device_that_nobody_named_says_what_was_assumed_and_how_to_name_one(capsys):
    assert main(["--dry-run", TASKS, "model.path=Qwen/Qwen2.5-0.5B", "model.max_length=2048"]) == 0
    printed = capsys.readouterr().out.replace("\n# ", " ")
    assert (
        "80 GB a device is assumed, whatever this machine has; name another in GB, such as --device-memory 24"
        in printed
    )


def test_a_plan_for_the_cpu_says_whose_memory_it_is_held_against():
    _, settings = plan_of("model.device=cpu")
    assert "is this machine's memory (model.device is cpu); name another" in " ".join(
        plan_lines(settings, None)
    )


def test_a_model_whose_sizes_nobody_knows_has_no_plan_and_a_remedy(capsys):
    assert main(["--dry-run", TASKS, "model.path=nobody/nothing"]) == 0
    assert "`hf download nobody/nothing config.json`" in capsys.readouterr().out.replace("\n# ", " ")


def test_device_memory_belongs_to_a_dry_run(capsys):
    assert main(["--device-memory", "80", TASKS]) == 2
    assert "--device-memory belongs to --dry-run" in capsys.readouterr().err


MEASURED = ROOT / "tests" / "support" / "measure_training_memory.py"


@pytest.mark.slow
def test_the_plan_is_within_a_tenth_of_measured_memory():
    """Two steps of 35 million random weights in a process of its own; peak memory above that of its imports."""
    held = b"x" * 2**30  # what the process has that starts it is not in its peak
    run = subprocess.run(
        [sys.executable, str(MEASURED)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=ROOT,
        # The C library then gives every tensor back as soon as it is freed: gaps in its heap are not the model's.
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    del held
    measured = json.loads(run.stdout.splitlines()[-1])
    shape = ModelShape.from_config(measured["config"])
    for name, checkpointing in (("plain", False), ("checkpointing", True)):
        training = Training(4, measured["micro_batch_tokens"], checkpointing, accelerator=False)
        need = trained_need(shape, training, Sharding(TORCH))
        assert need.lasting + need.moment == pytest.approx(measured["peaks"][name], rel=0.10), name
