"""The script for one GPU, where there is none: it says what is missing, and its cases run with random weights."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollgym.trainer.config.checks import check_unread
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.chat_templates import tokenizer_of
from tests.support.processes import ROOT, env_server

SCRIPT = ROOT / "examples" / "one_gpu" / "run.py"
_spec = importlib.util.spec_from_file_location("one_gpu", SCRIPT)
one_gpu = importlib.util.module_from_spec(_spec)
sys.modules["one_gpu"] = one_gpu
_spec.loader.exec_module(one_gpu)


def run(*words):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, cwd=ROOT
    )


@pytest.mark.parametrize("way", [[], ["--built"], ["--tiny"]], ids=" ".join)
def test_a_dry_run_shows_every_case_with_settings_that_load(monkeypatch, capsys, tmp_path, way):
    words = ["--dry-run", "--vllm", "/opt/vllm/bin/vllm", "--sglang", "/opt/sglang/bin/python"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--output", str(tmp_path), *way])
    assert one_gpu.main() == 0
    said = capsys.readouterr().out
    shown = {
        name: value for part in said.split("\n\n") for name, value in (yaml.safe_load(part) or {}).items()
    }
    assert list(shown) == list(one_gpu.CASES)
    commands = [shlex.split(line[2:]) for line in said.splitlines() if "-m rollgym.trainer.cli" in line]
    assert len(commands) == len(shown)
    for (name, value), command in zip(shown.items(), commands, strict=True):
        case = one_gpu.CASES[name]
        # What is shown is what the command says: read by the loader, both are one.
        settings = load_settings(Path(command[4]), command[5:])
        assert settings == load_settings(None, [f"{key}={json.dumps(each)}" for key, each in value.items()])
        check_unread(settings)
        assert settings.model.dtype == "bf16"
        assert (settings.model.lora is not None) is ("peft" in case.needs)
        assert settings.rollout.black_box is ("openai" in case.needs)
        server = settings.inference.kind
        assert {server} - {"embedded"} == case.needs & {"vllm", "sglang"}
        if server != "embedded":
            program = {"vllm": "/opt/vllm/bin/vllm", "sglang": "/opt/sglang/bin/python"}[server]
            assert settings.inference.launch.command[0] == program
        assert settings.output_dir == str(tmp_path / name)
    assert not list(tmp_path.iterdir()), "nothing is run"


def test_the_cases_are_what_one_gpu_has_to_show():
    cases = {
        name: load_settings(SCRIPT.parent / case.config, case.words) for name, case in one_gpu.CASES.items()
    }
    for server in ("vllm", "sglang"):
        of_server = [each for each in cases.values() if each.inference.kind == server]
        assert {"fp8"} <= {each.inference.quantization for each in of_server}
        assert {"abort", "keep", "recompute"} <= {each.weights.pause for each in of_server}
        assert {0, 1} <= {each.inference.sleep_level for each in of_server}
        assert any(each.model.lora for each in of_server)
    assert {"compaction", "single_turn", "full_history"} <= {each.prompt.context for each in cases.values()}


@pytest.mark.parametrize("config", ["frozen_lake.yaml", "arithmetic.yaml"])
async def test_its_evaluation_sets_can_be_made(config):
    """`--tiny` leaves them out."""
    settings = load_settings(SCRIPT.parent / config, [])
    with env_server() as url:
        async with EnvironmentPool(url, None, "msgpack", timeout_s=20.0) as pool:
            for name, each in settings.evaluation.sets.items():
                assert len((await build_evaluation_set(name, each, pool)).tasks) == each.episodes


def test_a_template_that_keeps_thinking_only_appends():
    """Then an episode with thinking is one segment."""
    tokenizer = tokenizer_of("qwen3")
    assert not ChatRenderer(tokenizer).append_only
    tokenizer.chat_template = (SCRIPT.parent / "keeps_thinking.jinja").read_text()
    assert ChatRenderer(tokenizer, {"enable_thinking": True}).append_only


@pytest.mark.slow
def test_what_is_missing_is_named_and_the_rest_is_run(tmp_path):
    words = [
        "--tiny",
        "--only",
        "embedded_lora",
        "agent",
        "compaction",
        "vllm",
        "--steps",
        "1",
        "--output",
        str(tmp_path),
    ]
    done = run(*words, "--vllm", str(tmp_path / "no-vllm"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"missing: vllm: no program {tmp_path}/no-vllm: install vLLM" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["vllm"]["state"] == "not run, for want of vllm"
    assert results["embedded_lora"]["state"] == "run"
    assert results["embedded_lora"]["exit_code"] == 0
    assert results["embedded_lora"]["steps"] == 1
    assert results["agent"]["steps"] == results["compaction"]["steps"] == 1
    assert (tmp_path / "embedded_lora" / "adapter" / "adapter_config.json").exists()


def test_a_check_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run.py",
            "--check",
            "--model",
            str(tmp_path / "gone"),
            "--vllm",
            "no-vllm",
            "--sglang",
            "no-python",
        ],
    )
    monkeypatch.setattr(one_gpu.torch.accelerator, "is_available", lambda: False)
    assert one_gpu.main() == 3
    said = capsys.readouterr().out
    assert "missing: accelerator: torch finds none" in said
    assert "missing: model: " in said
    assert "missing: sglang: no-python has no SGLang" in said
    assert "vllm_async: not run, for want of accelerator, model, vllm" in said
    assert "sglang_fp8: not run, for want of accelerator, model, sglang" in said
