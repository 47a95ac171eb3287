"""The command for a GPU machine without a network, where there is none: packing, limits, results, tables."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def module(monkeypatch):
    """Import a script of the folder as it would be run: beside the others."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("parts", "packing"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made
        spec.loader.exec_module(made)
        return made

    return load


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 35])
def test_what_is_cut_is_joined(module, tmp_path, size):
    packing = module("packing")
    source = tmp_path / "file"
    source.write_bytes(os.urandom(size))
    pieces = packing.cut(source, tmp_path / "packed", "model/file", piece=10)
    assert all((tmp_path / "packed" / piece).stat().st_size <= 10 for piece in pieces)
    packing.write_list(tmp_path / "packed", {"model/file": (packing.sha256(source), pieces)}, {})
    (whole,) = packing.joined(tmp_path / "packed", tmp_path / "work")
    assert whole.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("damage", ["missing", "changed", "no list"])
def test_what_did_not_arrive_whole_is_told(module, tmp_path, damage):
    packing = module("packing")
    source = tmp_path / "file"
    source.write_bytes(bytes(25))
    pieces = packing.cut(source, tmp_path / "packed", "file", piece=10)
    packing.write_list(tmp_path / "packed", {"file": (packing.sha256(source), pieces)}, {})
    if damage == "missing":
        (tmp_path / "packed" / pieces[1]).unlink()
    elif damage == "changed":
        (tmp_path / "packed" / pieces[1]).write_bytes(b"other____.")
    else:
        (tmp_path / "packed" / packing.LIST).unlink()
    with pytest.raises(packing.PackedFilesError, match=r"part001|packed\.json"):
        packing.joined(tmp_path / "packed", tmp_path / "work")


def test_a_part_that_is_over_its_time_is_ended_with_all_that_it_started(module, tmp_path):
    run = module("run")
    code = (
        "import json, subprocess, sys, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'slow.json')!r}).write_text(json.dumps({{'so far': 1}}))\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    part = run.Part("slow", "waits", 1, 0, lambda place: (sys.executable, "-c", code))
    found, _ = run.measured(part, run.Place(True, None, tmp_path, 3.0), dict(os.environ))
    assert found["stopped"] == "after its 3 s"
    assert found["figures"] == {"so far": 1}, "what it had is kept"
    child = Path("/proc", (tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline


def test_results_are_on_disk_after_each_part(module, tmp_path):
    run = module("run")
    results = run.Results(tmp_path / "results", {"device": "none"})
    results.add("first", {"exit_code": 0, "seconds": 1.0}, "said")
    assert json.loads((tmp_path / "results/gpu.json").read_text())["parts"]["first"]["seconds"] == 1.0
    results.add("second", {"exit_code": 1, "seconds": 1.0}, "x" * 100_000 + "why")
    assert json.loads((tmp_path / "results/gpu.json").read_text())["device"] == "none"
    log = (tmp_path / "results/gpu.log").read_text()
    assert log.endswith("why\n")
    assert len(log) < 20_000
    assert results.failed == ["second"]
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_the_page_has_the_table_of_the_record(module):
    tables = module("tables")
    text = tables.PAGE.read_text(encoding="utf-8")
    record = json.loads(tables.RECORD.read_text()) if tables.RECORD.exists() else None
    assert tables.page_of(text, record) == text, "python benchmarks/gpu/tables.py"


def run_of(success, steps=40, rate=1.0, health=()):
    """What learning.py writes of a run, with the success on each set before and after it."""
    evaluated = [
        {"step": step} | {f"evaluate/{name}/sampled/success": each[index] for name, each in success.items()}
        for index, step in enumerate((0, steps))
    ]
    curve = [{"step": step, "rollout/success": (step - 1) / 40} for step in range(1, steps + 1, 4)]
    return {"steps": steps, "rate": rate, "health": health, "evaluated": evaluated, "curve": curve[:10:2]}


def test_a_record_becomes_a_table(module):
    found = {
        "tests": {"exit_code": 0, "seconds": 21.0},
        "training": {
            "exit_code": 0,
            "seconds": 50.0,
            "figures": {
                "results": {
                    "sdpa": {"tokens_per_s": 82_300.4, "mfu": 0.223, "peak_gib": 30.5},
                    "flash attention": {"not_run": "no flash_attn"},
                }
            },
        },
        "backends": {
            "exit_code": 1,
            "seconds": 9.0,
            "last_words": ["a | b"],
            "figures": {"fsdp2": {"steps": 3, "step_s": [1, 2, 0.5]}},
        },
        "sampling": {
            "exit_code": 0,
            "seconds": 9.0,
            "figures": {
                "results": {
                    "64 rows": {
                        "slots": {"tokens_per_s": 12_000.4, "ms_per_decoding_step": 5.33},
                        "generate": {"tokens_per_s": 975.0},
                    }
                }
            },
        },
        "learning": {
            "exit_code": 0,
            "seconds": 9.0,
            "figures": {
                "FrozenLake": run_of({"lakes": [0.012, 0.391]}),
                "Sokoban": run_of({"simple": [0.1, 0.4], "larger": [0.0, 0.0]}),
                "tools": run_of({}, steps=0),
            },
        },
        "learning_rate": {
            "exit_code": 0,
            "seconds": 9.0,
            "figures": {
                "FrozenLake": run_of(
                    {"lakes": [0.012, 0.0]}, rate=3.0, health=["health: entropy fell", "more"]
                )
            },
        },
        "preset": {
            "exit_code": 0,
            "seconds": 9.0,
            "figures": {
                "sampled_by": "vLLM",
                "steps": 3,
                "first_step_s": 61.5,
                "later": {"time/step_s": 20.25},
                "device": {"compile": "inductor"},
            },
        },
        "vllm": {"not_run": "no program vllm"},
    }
    about = {
        "command": "python benchmarks/gpu/run.py",
        "device": "H200",
        "python": "3.12",
        "versions": {"torch": "2.13"},
        "commit": "0123456789",
        "parts": found,
    }
    page = "before\n<!-- from gpu.json -->\nold\n<!-- end of gpu.json -->\nafter\n"
    lines = module("tables").page_of(page, about).splitlines()
    assert lines[2] == "H200, Python 3.12, torch 2.13; commit 01234567."
    assert "| tests |  | ended well in 21 s |" in lines
    assert "| training | sdpa | 82,300 tokens a second, MFU 22.3 %, 30.5 GiB |" in lines
    assert "|  | flash attention | not run: no flash_attn |" in lines
    assert "| backends |  | exit code 1: a / b |" in lines
    assert "|  | fsdp2 | 3 of 3 steps; 0.50 s a step |" in lines
    assert "| sampling | 64 rows, slots | 12,000 tokens a second, 5.3 ms a step |" in lines
    assert "|  | 64 rows, generate | 975 tokens a second |" in lines
    assert "| learning | FrozenLake | 40 steps; success step 0: 0.012, step 40: 0.391 (goal 0.60) |" in lines
    sokoban = "simple step 0: 0.100, larger step 0: 0.000, simple step 40: 0.400, larger step 40: 0.000"
    assert f"|  | Sokoban | 40 steps; success {sokoban} (goal above 0.352 on `simple`) |" in lines
    assert "|  | tools | 0 steps; success not measured |" in lines
    too_high = "40 steps; success step 0: 0.012, step 40: 0.000; health: entropy fell"
    assert f"| learning_rate | FrozenLake | {too_high} |" in lines
    assert "| preset | sampled by vLLM | 3 steps, the first in 61.5 s |" in lines
    assert "|  | a later step | step_s 20.25 |" in lines
    assert '|  | what the device decided | {"compile": "inductor"} |' in lines
    assert "| vllm |  | not run: no program vllm |" in lines
    curve = "1: 0.00, 9: 0.20, 17: 0.40, 25: 0.60, 33: 0.80"
    assert f"| learning | FrozenLake | {curve} |" in lines
    assert "| learning | tools | no step |" in lines
    assert "`python benchmarks/gpu/run.py`" in lines
    assert "old" not in lines


def test_where_torch_finds_no_accelerator_that_is_said_before_anything_runs(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--output", str(tmp_path / "results")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert "--tiny runs each part on a processor" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_where_there_is_no_accelerator(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "--tiny",
        "--minutes",
        "14",
        "--output",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=860, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    ran = {name: found for name, found in parts.items() if "not_run" not in found}
    assert set(parts) - set(ran) <= {"beside_trl_equal", "beside_trl_padded", "vllm"}, parts
    assert all(found["exit_code"] == 0 for found in ran.values())
    assert all(each["eval_exit_code"] == 0 for each in ran["learning"]["figures"].values())
    assert set(ran["learning"]["figures"]) == {"FrozenLake", "sums", "Sokoban", "WebShop", "tools"}
    assert [ran[name]["figures"]["FrozenLake"]["seed"] for name in ("learning_1", "learning_2")] == [1, 2]
    assert ran["learning_rate"]["figures"]["FrozenLake"]["rate"] == 3.0
    assert ran["preset"]["figures"]["steps"] == 3
    assert ran["training"]["figures"]["results"]["sdpa"]["tokens_per_s"] > 0
