"""Kernels that a run may choose: compiled layers, fused optimizers, attention. Here, and on an accelerator if any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollgym.trainer.backends import packing
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.device import use_liger
from rollgym.trainer.models.load import set_attention
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.run.layout import check_combinations
from tests.support.current_families import model_of
from tests.support.rank_recipes import head_of
from tests.support.sharded_models import SUPERVISED, relative, settings_of, some_rows
from tests.support.sharing_ranks import CHEAP
from tests.support.tiny_models import sharp_model
from tests.trainer.backends.test_shared_prefixes import tree_rows, weighted

ROOT = Path(__file__).resolve().parents[3]
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
PROCESSOR = torch.device("cpu")
DEVICES = [PROCESSOR] if ACCELERATOR is None else [PROCESSOR, ACCELERATOR]
on_an_accelerator = pytest.mark.skipif(ACCELERATOR is None, reason="torch finds no accelerator here")
SCHEDULE = Schedule(1e-3, 0, 1, "constant")


def backend_of(device, head=None, dtype=torch.float32, **options):
    own = {name: options.pop(name) for name in ("compiled", "gradient_checkpointing") if name in options}
    head = (head or head_of("policy")).to(device)
    return TorchBackend(head, settings_of(**({"epsilon": 1e-5} | options)), SCHEDULE, dtype=dtype, **own)


def after(backend, steps=3):
    """Weights after some steps, on the processor."""
    for _ in range(steps):
        assert backend.step(some_rows(), SUPERVISED, entropy="metric").applied
    return {name: tensor.cpu().float() for name, tensor in backend.export()}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"kind": "sgd", "epsilon": 1e-8, "fused": True},
        pytest.param({"gradient_checkpointing": True, "compiled": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param({"compiled": "aot_eager"}, marks=pytest.mark.slow),
        {"shared_prefixes": "off", "compiled": "aot_eager"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_steps_are_those_without(device, options):
    plain = {name: options[name] for name in ("kind", "epsilon") if name in options}
    if device != PROCESSOR and "compiled" in options:
        options = options | {"compiled": "inductor"}
    found, expected = (after(backend_of(device, **chosen)) for chosen in (options, plain))
    assert relative([found], [expected]) < (1e-6 if device == PROCESSOR else 1e-5)


def test_a_fused_step_is_torchs():
    backend = backend_of(PROCESSOR, fused=True)
    assert backend._optimizer.defaults["fused"] is True
    assert not backend_of(PROCESSOR)._optimizer.defaults["fused"]


def test_layers_are_compiled_for_training_only():
    """What samples with the same weights runs the layers as they are."""
    head = head_of("policy")
    backend = backend_of(PROCESSOR, head, compiled="eager")
    layers = list(head.model.model.layers)
    seen = []
    layers[0].self_attn.register_forward_hook(lambda *_: seen.append(layers[0]._compiled_call_impl))
    backend.step(some_rows(), SUPERVISED)
    backend.forward(some_rows())
    assert seen[0] is not None
    assert seen[-1] is None
    assert all(layer._compiled_call_impl is None for layer in layers)


@pytest.mark.slow
def test_compiled_layers_share_prefixes(monkeypatch):
    monkeypatch.setattr(packing, "sharing_costs", lambda *_: CHEAP)
    found = []
    for compiled in ("eager", None):
        backend = backend_of(PROCESSOR, PolicyHead(model_of("gemma-2"), 1.0), compiled=compiled)
        report = backend.step(tree_rows(), weighted)
        assert report.tokens.computed < 0.7 * report.tokens.rows
        found.append({name: tensor.clone() for name, tensor in backend.export()})
    assert relative(found[:1], found[1:]) < 1e-6


def test_a_compiler_that_torch_does_not_have_is_refused():
    with pytest.raises(
        ConfigError, match=r"model\.compile turbo: torch has no such backend; it has .*inductor"
    ):
        backend_of(PROCESSOR, compiled="turbo")


def test_rows_share_nothing_behind_an_attention_that_hides_nothing_between():
    model = sharp_model()
    head = PolicyHead(model, 1.0)
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in head.why_not_shared


def test_an_attention_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match=r"model\.attention no_such_attention"):
        set_attention([sharp_model()], "no_such_attention")
    set_attention([model := sharp_model()], "eager")
    assert model.config._attn_implementation == "eager"


def test_ligers_kernels_are_refused_where_they_do_not_run():
    with pytest.raises(ConfigError, match=r"model\.kernels liger: .* in Triton for accelerators"):
        use_liger(sharp_model())
    ranks = ["tasks=[{env_id: FrozenLake-v0}]", "model.kernels=liger", "backend={kind: fsdp2, ranks: 2}"]
    with pytest.raises(ConfigError, match=r"model\.kernels liger: backend\.kind fsdp2 .* leave it out"):
        check_combinations(load_settings(None, ranks))


_COMPILED_ONCE = """
import sys, torch
from torch._dynamo.utils import counters
from tests.trainer.backends.test_kernels import PROCESSOR, SUPERVISED, backend_of, some_rows
torch.set_num_threads(1)
assert backend_of(PROCESSOR, compiled="inductor", shared_prefixes="off").step(some_rows(), SUPERVISED).applied
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_was_compiled_is_found_by_the_next_run(tmp_path):
    """It is kept in the user's cache, and not among temporary files."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("there is no C++ compiler")
    if " " in torch.__file__:
        pytest.skip("torch quotes no blank in its own path for the linker")
    environment = {name: text for name, text in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    counted = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _COMPILED_ONCE],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        counted.append([int(number) for number in done.stdout.splitlines()[-1].split()])
    (_, compiled), (found, again) = counted
    assert compiled > 0
    assert found > 0
    assert again == 0
    assert any((tmp_path / "rollgym" / "compiled").iterdir())


# On an accelerator


@on_an_accelerator
@pytest.mark.parametrize("lora", [False, True])
def test_an_accelerator_steps_as_the_processor_does(lora):
    found, expected = (
        after(backend_of(device, head_of("policy", lora=lora))) for device in (ACCELERATOR, PROCESSOR)
    )
    assert relative([found], [expected]) < 1e-5


@on_an_accelerator
def test_bf16_on_an_accelerator_stays_near_float32():
    found, expected = (
        after(backend_of(ACCELERATOR, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)
    )
    assert relative([found], [expected]) < 2e-2


@on_an_accelerator
@pytest.mark.parametrize("lora", [False, True])
def test_flash_attention_computes_what_others_do(lora):
    pytest.importorskip("flash_attn", reason="flash attention is not installed")
    found = []
    for attention in ("flash_attention_2", "sdpa"):
        model = sharp_model().to(ACCELERATOR, torch.bfloat16)
        if lora:
            add_lora(model, LoraSettings(rank=2), 0)
        set_attention([model], attention)
        found.append(after(backend_of(ACCELERATOR, PolicyHead(model, 1.0), dtype=torch.bfloat16)))
    assert relative([found[0]], [found[1]]) < 2e-2
