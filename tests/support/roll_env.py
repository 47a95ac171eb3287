"""`roll-env` as a user runs it, in this process or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from rollgym.clients.cli.main import main
from tests.support.processes import ROOT


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def roll_env(*arguments: str, stdin: str = "") -> Done:
    """Run the command in this process, which saves the start of an interpreter each time."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        contextlib.chdir(ROOT),
    ):
        try:
            code = main(arguments)
        except SystemExit as ended:  # of a word that the parser does not take
            code = int(ended.code or 0)
    return Done(code, stdout.getvalue(), stderr.getvalue())


def in_a_process(*arguments: str, cwd: Path = ROOT, **environment: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "rollgym.clients.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    return Done(done.returncode, done.stdout, done.stderr)
