"""The scripts that measure training: their tables are what was measured, and the one for GPUs runs without one."""

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.run.probe import _first_new, probe_log_probabilities
from tests.support.processes import ROOT


def module_of(folder, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables():
    return module_of("training", "tables")


def test_the_tables_of_the_results_are_what_was_measured():
    module = tables()
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page_of(text, ROOT / "benchmarks" / "results") == text, (
        "python benchmarks/training/tables.py"
    )


@pytest.mark.parametrize("seed", [5, 9, 11])
async def test_a_policy_whose_decoding_agrees_with_itself_to_the_bit_is_not_refused(seed):
    """The engine keeps its cache in another shape, and so rounds elsewhere."""
    family, model, prompt, temperature = module_of("training", "random_policies").start_of(seed)
    assert family in ("qwen2", "llama")
    async with TorchEngine(model, max_rows=2, max_length=128, shares_weights=True) as engine:
        await probe_log_probabilities(model, engine, prompt, temperature, 128)


class Looks:
    """An engine that counts how often it is asked."""

    def __init__(self, engine):
        self.engine, self.count = engine, 0

    async def generate_together(self, requests):
        self.count += 1
        return await self.engine.generate_together(requests)


@pytest.mark.parametrize(("planted", "looks"), [(False, 1), (True, 2)])
async def test_a_fault_that_is_hardly_larger_than_rounding_is_looked_at_again(planted, looks):
    """128 tokens of this policy leave a doubt."""
    policies = module_of("training", "random_policies")
    _, model, prompt, temperature = policies.start_of(5)
    served = policies.with_layer_fault(model, 5, 0.01) if planted else model
    async with TorchEngine(served, max_rows=2, max_length=128, shares_weights=True) as engine:
        asked = Looks(engine)
        with pytest.raises(ConfigError, match="do not agree") if planted else nullcontext():
            await probe_log_probabilities(model, asked, prompt, temperature, 128)
    assert asked.count == looks


def test_what_a_reply_repeats_of_an_earlier_one_is_no_news():
    replies = [torch.tensor(each) for each in ([1, 2, 3, 4], [1, 2, 5, 4], [7], [])]
    assert _first_new(replies[0], []) == 0
    assert _first_new(replies[1], replies[:1]) == 3, "the 5 is drawn from the logits that gave 3"
    assert _first_new(replies[0], replies[:2]) == 4
    assert _first_new(replies[2], replies[:2]) == 1
    assert _first_new(replies[3], replies[:2]) == 0


def test_a_record_of_a_gpu_becomes_a_table(tmp_path):
    found = {
        "sdpa": {"tokens_per_s": 20480.4, "peak_gib": 12.5, "model_tflops_per_s": 61.25, "mfu": 0.0619},
        "flash attention": {"not_run": "ImportError: no flash_attn"},
        "generation": {"generated_tokens_per_s": 1234.5, "peak_gib": 3.0},
        "beside TRL": {},
    }
    (tmp_path / "one_gpu.json").write_text(json.dumps({"results": found}))
    page = "before\n<!-- from one_gpu.json -->\nold\n<!-- end of one_gpu.json -->\nafter\n"
    lines = tables().page_of(page, tmp_path).splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "| sdpa | 20,480 |  | 12.5 | 61.25 | 6.2 % |" in lines
    assert "| flash attention | not run: ImportError: no flash_attn |  |  |  |  |" in lines
    assert "| generation |  | 1,234 | 3 |  |  |" in lines
    assert "old" not in lines


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_cases_of_one_gpu_run_where_there_is_none(tmp_path):
    output = tmp_path / "one_gpu.json"
    script = ROOT / "benchmarks" / "training" / "one_gpu.py"
    cases = ["fsdp2, compiled layers, fused AdamW", "generation", "flash attention"]
    words = ["--tiny", "--device", "cpu", "--rounds", "1", "--warm-up", "1", "--compile", "eager"]
    done = subprocess.run(
        [sys.executable, str(script), *words, "--only", *cases, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())["results"]
    assert results["fsdp2, compiled layers, fused AdamW"]["tokens_per_s"] > 0
    assert results["generation"]["generated_tokens_per_s"] > 0
    assert "flash" in results["flash attention"]["not_run"]


@pytest.mark.slow
def test_a_preset_is_compared_in_ranks_with_unequal_numbers_of_micro_batches_and_not_again(tmp_path):
    pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
    script, out = ROOT / "benchmarks" / "training" / "presets_in_ranks.py", tmp_path / "found.json"
    command = [sys.executable, script, "--presets", "starpo_s", "--backends", "fsdp2", "zero3", "--out", out]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads(out.read_text())
    assert (found["cases"], found["equal"]) == (8, 8)
    first, second = found["micro_batches_of_the_ranks"]["unequal"]
    assert first != second
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert again.stdout.splitlines() == ["8 cases, 8 equal"]


@pytest.mark.slow
def test_decoding_is_measured_where_there_is_no_gpu(tmp_path):
    output = tmp_path / "decoding.json"
    script = ROOT / "benchmarks" / "training" / "decoding.py"
    words = ["--tiny", "--device", "cpu", "--dtype", "fp32", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())["results"]
    assert set(results) == {"2 rows", "5 rows"}
    for found in results.values():
        assert set(found) == {"slots", "one cache", "generate"}
        assert all(each["tokens_per_s"] > 0 for each in found.values())
    launched = [found["slots"]["launches_per_decoding_step"] for found in results.values()]
    assert launched[0] == launched[1]
