"""Runs of roll-train that share a device: begun together, ended in order when their time is over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TINY = (
    "model={path: null, hidden_size: 32, layers: 1, heads: 2, max_length: 512}",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "rollout.max_turns=2",
    "warm_start=null",
)
"""Settings that a processor is quick with."""
WITHOUT_BOARDS = ("tracking={tensorboard: false, console: false}",)
"""Their metrics are a file, and their output lines."""


def tiny(words: Sequence[str]) -> list[str]:
    """Return settings of a run, with a model of random weights and few episodes."""
    return [*words, *_TINY]


def start(folder: Path, command: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `roll-train` with its output in a file beside the run's folder.

    Args:
        folder: Of the run.
        command: `train`, or another one of roll-train's.
        words: What follows it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(f".{command}.log")
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rollgym.trainer.cli", *([] if command == "train" else [command]), *words],
            env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait(processes: Mapping[str, subprocess.Popen[bytes]], until: float, grace_s: float) -> dict[str, int]:
    """Wait for programs, ask those that still run at a time to end, and return the exit codes.

    Args:
        processes: By their names.
        until: By `time.monotonic`.
        grace_s: Seconds that they have then, all together; who takes longer is killed.
    """
    for process in processes.values():
        _wait_until(process, until)
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + grace_s
    for process in processes.values():
        _wait_until(process, until)
        if process.poll() is None:
            process.kill()
    return {name: process.wait() for name, process in processes.items()}


def _wait_until(process: subprocess.Popen[bytes], until: float) -> None:
    try:
        process.wait(max(until - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics; none if it has not begun."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def last_line(log: Path) -> str:
    """Return the last line that a program has said."""
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return said[-1][:300] if said else ""


def said_of_health(log: Path) -> list[str]:
    """Return the lines in which a run says that it may learn nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [line[line.index("health:") :][:300] for line in lines if "health:" in line]
