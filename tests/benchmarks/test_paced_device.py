"""The benchmark with a device of known pace: the device does one thing at a time, and no moment is counted twice."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.rollout import paced_device
from tests.support.processes import ROOT


def test_the_device_does_one_thing_at_a_time():
    device = paced_device.Device()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(device.take, [0.002] * 20))
    assert len(device.busy) == 20
    assert all(before[1] <= after[0] for before, after in zip(device.busy, device.busy[1:], strict=False))
    since, until = device.busy[0][0], device.busy[-1][1]
    assert device.busy_between(since, until) == pytest.approx(0.04)
    assert device.busy_between(since + 0.001, since + 0.002) == pytest.approx(0.001)
    assert device.busy_between(until, until + 1) == 0.0


@pytest.mark.slow
def test_a_run_is_told_with_all_its_time(tmp_path):
    quick = ["--steps", "4", "--groups", "2", "--decode-ms", "1", "--prompts-ms", "1", "--train-s", "0.02"]
    command = [sys.executable, str(ROOT / "benchmarks/rollout/paced_device.py"), *quick]
    command += ["--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["episodes_per_step"] == 16
    assert set(record["results"]) == {"staleness 0", "staleness 1"}
    for found in record["results"].values():
        assert found["busy_s"] + sum(found["idle_s"].values()) == pytest.approx(found["step_s"], rel=0.02)
        assert found["busy"] == pytest.approx(found["busy_s"] / found["step_s"])
        assert found["busy_s"] > 0.02, "it trains, and it samples"
        assert 1 <= found["turns_per_episode"] <= 10
