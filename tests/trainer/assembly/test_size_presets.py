"""Runs by size of model and number of GPUs: each is read, placed, and fits by its memory plan; nothing is fetched."""

from pathlib import Path

import pytest

from rollgym.trainer.assembly.memory import memory_plan, model_shape
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.commands.memory import plan_lines
from rollgym.trainer.config.load import load_settings

FOLDER = Path(__file__).parents[3] / "examples" / "presets"
PRESETS = sorted(FOLDER.glob("*.yaml"))
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
