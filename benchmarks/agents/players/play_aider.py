"""aider: its command, which streams by itself, on a file."""
# /// script
# dependencies = ["aider-chat"]
# ///

import subprocess
import sys
import tempfile
from pathlib import Path

import parts


def run(*options):
    command = [sys.executable, "-m", "aider", "--model", f"openai/{parts.MODEL}", "--yes-always", "--no-git"]
    command += [
        "--no-check-update",
        "--no-analytics",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        *options,
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sum.txt").write_text("1 + 2\n")
        done = subprocess.run(
            [*command, "--message", parts.QUESTION, "sum.txt"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout[-200:]


parts.play(stream=run, plain=lambda: run("--no-stream"))
