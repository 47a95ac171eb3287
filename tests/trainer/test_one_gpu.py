"""The script for one GPU, where there is none: it says what is missing, and its cases run with random weights."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support.processes import ROOT
from trainer.config.load import load_settings

SCRIPT = ROOT / "examples" / "one_gpu" / "run.py"
_spec = importlib.util.spec_from_file_location("one_gpu", SCRIPT)
one_gpu = importlib.util.module_from_spec(_spec)
sys.modules["one_gpu"] = one_gpu
_spec.loader.exec_module(one_gpu)


def run(*words):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, cwd=ROOT
    )


@pytest.mark.parametrize("name", one_gpu.CASES)
def test_the_settings_of_a_case_are_settings(name):
    case = one_gpu.CASES[name]
    settings = load_settings(SCRIPT.parent / case.config, case.words)
    assert settings.model.dtype == "bf16"
    assert (settings.model.lora is not None) is ("peft" in case.needs)
    assert (settings.inference.kind == "vllm") is ("vllm" in case.needs)


@pytest.mark.slow
def test_what_is_missing_is_named_and_the_rest_is_run(tmp_path):
    words = ["--tiny", "--only", "embedded_lora", "vllm", "--steps", "1", "--output", str(tmp_path)]
    done = run(*words, "--vllm", str(tmp_path / "no-vllm"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"missing: vllm: no program {tmp_path}/no-vllm: install vLLM" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["vllm"]["state"] == "not run, for want of vllm"
    assert results["embedded_lora"]["state"] == "run"
    assert results["embedded_lora"]["exit_code"] == 0
    assert results["embedded_lora"]["steps"] == 1
    assert (tmp_path / "embedded_lora" / "adapter" / "adapter_config.json").exists()


def test_a_check_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--check", "--model", str(tmp_path / "gone"), "--vllm", "no-vllm"]
    )
    monkeypatch.setattr(one_gpu.torch.accelerator, "is_available", lambda: False)
    assert one_gpu.main() == 3
    said = capsys.readouterr().out
    assert "missing: accelerator: torch finds none" in said
    assert "missing: model: " in said
    assert "vllm_async: not run, for want of accelerator, model, vllm" in said
