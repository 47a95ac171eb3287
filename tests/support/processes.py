"""Real servers and real runs, as a user starts them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def env_server(*arguments: str) -> Iterator[str]:
    """Run `roll-serve` on a free loopback port and give its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "env_server", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"rollgym serving on (http://\S+)", line):
                yield match.group(1)
                break
        else:
            raise RuntimeError("the server ended before it was ready")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stdout.close()


def start_training(*arguments: str) -> subprocess.Popen[str]:
    """Start `roll-train` with its output captured."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def train(*arguments: str) -> str:
    """Run `roll-train` to its end and return what it printed."""
    process = start_training(*arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def read_lines(path: Path) -> list[dict]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
