"""What a run leaves to its device: micro-batches by the memory plan, and that it is said and written down."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from rollgym.trainer.backends.base import StepKernels
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.optimizer import OptimizerSettings, PlannedMicroBatch
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.run.device_choices import (
    DeviceChoices,
    keep_choices,
    say_choices,
    with_planned_micro_batch,
)
from rollgym.trainer.run.memory import memory_plan, model_shape, planned_micro_batch
from tests.support.sharded_models import SUPERVISED, relative, some_rows
from tests.support.tiny_models import sharp_model

TASKS = "tasks=[{env_id: FrozenLake-v0}]"
GB = 10**9


def settings_of(*words):
    return load_settings(None, [TASKS, *words])


def planned(settings, gb, free=None):
    chosen = planned_micro_batch(settings, model_shape(settings.model), int(gb * GB), int((free or gb) * GB))
    return chosen.tokens, chosen.peak_bytes


HALF_B = ("model={path: Qwen/Qwen2.5-0.5B, max_length: 1024, dtype: bf16}",)


def test_micro_batches_are_as_large_as_the_plan_has_room_for():
    settings = settings_of(*HALF_B)
    sizes = [planned(settings, gb)[0] for gb in (12, 24, 48, 80, 141)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 32_768, "more than that keeps a device no busier"
    assert len(set(sizes)) > 2
    # What another process holds is not there.
    assert planned(settings, 141, free=24)[0] == planned(settings, 24)[0]
    # Fewer activations, larger micro-batches.
    checkpointed = settings_of(*HALF_B, "model.gradient_checkpointing=true")
    assert planned(checkpointed, 24)[0] > planned(settings, 24)[0]


@given(gb=st.floats(4.0, 200.0), length=st.sampled_from([128, 256, 1024, 5000, 40_000]))
@example_settings(deadline=None, max_examples=15)
def test_the_next_larger_micro_batch_would_not_fit(gb, length):
    settings = settings_of("model={path: Qwen/Qwen2.5-1.5B, dtype: bf16}", f"model.max_length={length}")
    tokens, peak = planned(settings, gb)
    shape = model_shape(settings.model)

    def peak_of(size):
        changed = settings.optimizer.model_copy(update={"tokens_per_micro_batch": size})
        return memory_plan(settings.model_copy(update={"optimizer": changed}), shape, int(gb * GB)).peak

    assert peak == peak_of(tokens)
    assert tokens >= min(length, 32_768), "a row is never cut"
    if tokens < 24_576:
        assert peak_of(max(tokens, length) * 2) > 0.9 * gb * GB


def test_what_is_set_is_not_planned(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", None)  # nobody looks at the device
    settings = settings_of("optimizer.tokens_per_micro_batch=512")
    assert with_planned_micro_batch(settings) is settings
    assert settings.optimizer.micro_batch_tokens == 512
    ready = settings.optimizer.planned(PlannedMicroBatch(4096, GB))
    assert ready.micro_batch_tokens == 512
    assert ready.planned_micro_batch is None


def test_a_processor_has_the_micro_batches_that_it_always_had():
    settings = with_planned_micro_batch(settings_of("model.device=cpu"))
    assert settings.optimizer.tokens_per_micro_batch == "auto"
    assert settings.optimizer.micro_batch_tokens == 16_384


@pytest.mark.parametrize("value", ["0", "-5", "true", "soon", "1.5", ".nan", "null"])
def test_a_micro_batch_is_a_number_of_tokens_or_auto(value):
    with pytest.raises(ConfigError, match=r"optimizer\.tokens_per_micro_batch") as refused:
        settings_of(f"optimizer.tokens_per_micro_batch={value}")
    assert "\n" not in str(refused.value)


class Device:
    """A loss whose micro-batches find no room above a number of tokens."""

    def __init__(self, room):
        self.room, self.seen = room, []

    def __call__(self, micro):
        self.seen.append(micro.mask.numel())
        if micro.mask.numel() > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return SUPERVISED(micro)


def backend_of(**options):
    schedule = Schedule(1e-3, 0, 1, "constant")
    return TorchBackend(PolicyHead(sharp_model(), 1.0), OptimizerSettings(epsilon=1e-5, **options), schedule)


def test_micro_batches_that_find_no_room_in_the_first_step_become_smaller(caplog, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.backends.torch_backend._FEWEST_TOKENS", 8)
    device, backend = Device(40), backend_of()
    assert backend.step(some_rows(), device).applied
    assert max(device.seen[-3:]) <= 40
    assert "they have 32 tokens from now on" in caplog.records[-1].message
    expected = backend_of(tokens_per_micro_batch=32)
    assert expected.step(some_rows(), SUPERVISED).applied
    assert relative([dict(backend.export())], [dict(expected.export())]) == 0.0, "nothing was added up twice"
    # Later on something else takes the memory.
    device.room = 8
    with pytest.raises(torch.OutOfMemoryError):
        backend.step(some_rows(), device)


def test_micro_batches_that_somebody_chose_stay():
    with pytest.raises(torch.OutOfMemoryError):
        backend_of(tokens_per_micro_batch=128).step(some_rows(), Device(40))


def test_what_finds_no_room_however_small_is_told():
    device = Device(0)
    with pytest.raises(torch.OutOfMemoryError):
        backend_of().step(some_rows(), device)
    assert len(device.seen) <= 8


def test_what_was_chosen_is_said_and_written(tmp_path):
    settings = settings_of("model.device=cpu", "model.dtype=bf16")
    settings = settings.model_copy(
        update={"optimizer": settings.optimizer.planned(PlannedMicroBatch(24_576, 30 * 2**30))}
    )
    kernels = StepKernels("inductor", fused=True, packed=True)
    assert list(say_choices(settings, kernels)) == [
        "training on cpu: micro-batches of 24576 tokens (at most 30.0 GiB by the memory plan), rows packed, layers "
        "compiled by inductor, steps fused, bf16"
    ]
    keep_choices(settings, kernels, tmp_path)
    written = json.loads((tmp_path / "device.json").read_text())
    assert DeviceChoices(**written) == DeviceChoices.of(settings, kernels)
    assert written["tokens_per_micro_batch"] == 24_576


def test_nothing_is_said_where_all_is_as_on_every_processor():
    assert not list(say_choices(settings_of("model.device=cpu"), StepKernels()))
