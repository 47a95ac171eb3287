"""Layouts: one that cannot be is refused by `--dry-run` with what to take instead; the presets by size fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.shape import KNOWN
from rollgym.trainer.run.layout import check_division, check_model
from rollgym.trainer.run.memory import memory_plan, model_shape, plan_lines
from tests.support.memory_plans import TASKS, plan_of

FOLDER = Path(__file__).parents[3] / "examples" / "presets"
PRESETS = sorted(FOLDER.glob("*.yaml"))
SEVEN, MIXTURE = "model.path=Qwen/Qwen2.5-7B", "model.path=Qwen/Qwen3-30B-A3B"
LAUNCHED = "inference={kind: vllm, launch: {tensor_parallel: %d}}"
MEGATRON = "backend={kind: megatron, ranks: %d, mesh: {%s}}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [SEVEN, "backend={kind: fsdp2, ranks: 8, mesh: {tensor: 8}}"],
            "backend.mesh.tensor 8 does not divide num_attention_heads (28): take 4, or another number that does",
        ),
        (
            [MIXTURE, "backend={kind: fsdp2, ranks: 2, mesh: {tensor: 2}}"],
            "layers of 128 experts are not divided by fsdp2: set backend.mesh.tensor=1, or take backend.kind=megatron",
        ),
        (
            [SEVEN, "model.lora={}", "backend={kind: fsdp2, ranks: 2, mesh: {tensor: 2}}"],
            "adapters (model.lora) are not divided by tensor parallelism here",
        ),
        (
            [SEVEN, MEGATRON % (3, "pipeline: 3")],
            "backend.mesh.pipeline 3 does not divide num_hidden_layers (28): take 2, or another number that does",
        ),
        (
            [SEVEN, MEGATRON % (2, "data: 2, expert: 2")],
            "a model of type qwen2 has no experts: leave it out",
        ),
        (
            [MIXTURE, MEGATRON % (3, "data: 3, expert: 3")],
            "backend.mesh.expert 3 does not divide the number of experts (128): take 2",
        ),
        (
            [MIXTURE, "backend={kind: megatron, ranks: 2, mesh: {tensor: 2}, sequence_parallel: false}"],
            "experts and mesh.tensor 2 together need it",
        ),
        (
            [SEVEN, MEGATRON % (4, "tensor: 2, pipeline: 4")],
            "ranks 4 is not the mesh's product (data 1 x tensor 2 x pipeline 4 x context 1 is 8): set ranks to 8",
        ),
        (
            [SEVEN, "model.lora={}", MEGATRON % (2, "data: 2")],
            "adapters are not trained by backend.kind megatron",
        ),
        (
            [SEVEN, "model.compile=inductor", "backend={kind: deepspeed, ranks: 2}"],
            "model.compile: what backend.kind deepspeed hooks into a model is not compiled with",
        ),
        (
            [SEVEN, LAUNCHED % 3],
            "inference.launch.tensor_parallel 3 does not divide the model's 28 attention heads",
        ),
        (
            [
                MIXTURE,
                "inference={kind: vllm, launch: {tensor_parallel: 16}}",
                "backend={kind: fsdp2, ranks: 16}",
            ],
            None,
        ),
        (
            ["model.path=Qwen/Qwen2.5-14B", "inference={kind: vllm, launch: {tensor_parallel: 20}}"],
            "20 neither divides the model's 8 heads of keys and values nor is a multiple of them: take 8",
        ),
        (
            [SEVEN, "inference={kind: vllm, launch: {}, routed_experts: true}"],
            "inference.routed_experts: the model is of type qwen2, which has no experts",
        ),
        (
            [SEVEN, "optimizer.router_replay=true", "algorithm={preset: grpo, minibatches: 2}"],
            "optimizer.router_replay: the model is of type qwen2, which has no experts",
        ),
        (
            [
                MIXTURE,
                MEGATRON % (4, "data: 4, expert: 2"),
                "algorithm={preset: grpo, kl: {coefficient: 0.1}}",
                "cluster={roles: {reference: {devices: [4, 5, 6]}}}",
            ],
            "names 3 devices, which are 3 of `data` (backend.mesh), and experts are divided over 2 of these",
        ),
    ],
)
def test_a_dry_run_refuses_what_does_not_divide(words, said, capsys):
    code = main(["--dry-run", TASKS, *words])
    printed = capsys.readouterr()
    if said is None:
        assert (code, printed.err) == (0, "")
        return
    assert code == 2
    assert said in " ".join(printed.err.split())


def test_the_presets_of_every_size_divide(monkeypatch):
    assert len(PRESETS) > 5
    for file in PRESETS:
        settings = load_settings(file)
        check_model(settings)
        check_division(settings, KNOWN[settings.model.path])


def test_a_model_whose_sizes_are_not_here_is_looked_at_when_it_is_loaded(tmp_path):
    check_model(load_settings(None, [TASKS, "model.path=nobody/nothing"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    words = [TASKS, f"model.path={tmp_path}", MEGATRON % (2, "tensor: 2")]
    with pytest.raises(ConfigError, match=r"the model's config.json lacks a size: intermediate_size"):
        check_model(load_settings(None, words))


def test_a_dry_run_loads_no_torch():
    program = (
        "import sys; from rollgym.trainer.cli import main\n"
        f"assert main(['--dry-run', {TASKS!r}, {SEVEN!r}, 'backend={{kind: fsdp2, ranks: 2}}']) == 0\n"
        "assert not {'torch', 'transformers', 'ray', 'megatron'} & set(sys.modules), 'too much was loaded'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The memory plan counts every model of a run


def parts_of(*words):
    plan, settings = plan_of("model={path: Qwen/Qwen2.5-0.5B, dtype: bf16}", *words)
    return {part.name: part for part in plan.parts}, plan, settings


def test_teachers_beside_the_student_are_counted_as_the_backend_lays_them_out():
    teachers = (
        "distill={teachers: {big: {path: Qwen/Qwen2.5-7B}, far: {url: 'http://there:1', domains: [x]}}%s}"
    )
    alone, *_ = parts_of()
    beside, plan, _ = parts_of("distill={teachers: {big: {path: Qwen/Qwen2.5-7B}}}")
    assert beside["big"].need.weights == 2 * 7_615_616_512
    assert beside["policy"].need.activations > alone["policy"].need.activations, (
        "both are held of a micro-batch"
    )
    divided, *_ = parts_of(
        "distill={teachers: {big: {path: Qwen/Qwen2.5-7B}}}", "backend={kind: fsdp2, ranks: 4}"
    )
    assert divided["big"].need.weights == pytest.approx(2 * 7_615_616_512 / 4, rel=1e-6)
    scored, *_ = parts_of(
        teachers % ", estimate: sampled, divergence: reverse_kl", "backend={kind: fsdp2, ranks: 4}"
    )
    assert scored["big"].need.weights == 2 * 7_615_616_512, "it is whole, in the run's process"
    assert "far" not in scored, "a server's memory is its own"
    assert plan.peak > 15 * 2**30


def test_a_reference_that_is_another_model_is_there_before_training():
    data = "dpo={reference: Qwen/Qwen2.5-7B, data: [{path: pairs.jsonl}]}"
    parts, plan, _ = parts_of(data)
    own, without, _ = parts_of("dpo={data: [{path: pairs.jsonl}]}")
    assert parts["reference"].need.weights == 2 * 7_615_616_512
    assert "reference" not in own
    policy = parts["policy"].need
    reading = policy.lasting + parts["reference"].need.lasting + parts["reference"].need.moment
    assert plan.peak == max(reading, policy.lasting + policy.moment) + 2**30
    assert without.peak < plan.peak or policy.moment > parts["reference"].need.lasting


def test_a_reward_model_has_no_logits_and_a_judge_devices_of_its_own():
    policy, *_ = parts_of()
    reward, *_ = parts_of("reward={data: [{path: pairs.jsonl}]}")
    assert reward["reward"].need.activations < policy["policy"].need.activations
    judge = "{Rubric-v0: {devices: [1, 2], model: Qwen/Qwen2.5-7B, command: [serve]}}"
    judged, plan, _ = parts_of(f"cluster.roles.judges={judge}")
    assert judged["Rubric-v0"].alone
    assert judged["Rubric-v0"].need.weights == 7_615_616_512
    assert plan.peak_alone == int(0.9 * 80e9) + 2**30


def test_what_is_not_counted_is_said():
    _, plan, settings = parts_of("distill={teachers: {big: {path: nobody/nothing}}}")
    assert plan.uncounted[0].startswith(
        "distill.teachers.big: the sizes of nobody/nothing are not known here"
    )
    lines = plan_lines(settings, 80.0)
    assert any(line.startswith("not counted: distill.teachers.big") for line in lines)
    assert max(map(len, lines)) <= 78


BYTES = int(80e9)


def test_there_is_one_for_every_size_and_number_of_gpus():
    sizes = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b")
    expected = {f"{size}-{gpus}gpu" for size in sizes for gpus in (1, 8, 64)}
    assert {file.stem for file in PRESETS} == expected | {"qwen3-30b-a3b-megatron-64gpu"}


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_it_is_read_placed_and_fits(file):
    settings = load_settings(file)
    placed = place_roles(settings)
    gpus = int(file.stem.rpartition("-")[2].removesuffix("gpu"))
    used = {device for role in placed.roles for device in role.devices}
    if settings.inference.launch is not None:
        used |= {int(device) for each in settings.inference.launch.devices for device in each.split(",")}
    assert used == set(range(gpus))
    plan = memory_plan(settings, model_shape(settings.model), BYTES)
    assert plan.fits
    if gpus == 1:
        assert plan.peak < plan.device_bytes * 0.95, "some room is left for what is not reckoned"
    lines = plan_lines(settings, 80.0)
    assert max(map(len, lines)) <= 78
    assert lines[-1].endswith("fits") or lines[-2].endswith("fits")


def test_what_fits_is_no_matter_of_course():
    """The plan says no where it should: all weights of 7 billion on one GPU, 32 billion on eight without the host."""
    seven = load_settings(FOLDER / "qwen2.5-7b-1gpu.yaml", ["model.lora=null", "weights.transport=null"])
    assert not memory_plan(seven, model_shape(seven.model), BYTES).fits
    large = load_settings(FOLDER / "qwen2.5-32b-8gpu.yaml", ["backend.cpu_offload=false"])
    assert not memory_plan(large, model_shape(large.model), BYTES).fits
