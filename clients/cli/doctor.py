"""`roll-env doctor`: whether this machine and this installation are fit for use."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterator
from typing import Any

from rollgym.clients.checks.installation import check_imports, check_installation, required
from rollgym.clients.checks.report import Finding, Status, print_report
from rollgym.clients.process.local_server import LocalServer
from rollgym.extras import EXTRAS, install_line
from rollgym.version import __version__

_WANTED_FILES = 4096


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="look for what is wrong with this installation")
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if something is wrong."""
    findings = [*_versions(), *check_imports(), *check_installation(), *_extras(), _files(), *_loopback()]
    return print_report("this installation", findings, as_json=options.json)


def _versions() -> Iterator[Finding]:
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", Status.PASS, f"{python}, {os.cpu_count()} CPUs, {platform.platform()}")
    yield Finding("rollgym", Status.PASS, __version__)
    for name in required():
        try:
            yield Finding(name, Status.PASS, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Status.FAIL, "not installed", install_line())


def _extras() -> Iterator[Finding]:
    """Check the packages for training, and list the other optional packages that are installed."""
    missing = [name for name in EXTRAS["train"] if importlib.util.find_spec(name) is None]
    if missing:
        remedy = f"only for training: {install_line('train')}"
        yield Finding("extra train", Status.SKIP, f"without {', '.join(missing)}", remedy)
    else:
        yield Finding("extra train", Status.PASS, ", ".join(EXTRAS["train"]))


def _files() -> Finding:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return Finding("open files", Status.SKIP, "this system has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _WANTED_FILES:
        return Finding(
            "open files",
            Status.WARN,
            f"a process may open {soft} files; a busy server needs one for each connection",
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}",
        )
    return Finding("open files", Status.PASS, f"a process may open {soft}")


def _loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield Finding("loopback", Status.FAIL, str(error), "allow connections to 127.0.0.1")
        return
    yield Finding("loopback", Status.PASS, "connections to 127.0.0.1 work")
    try:
        with LocalServer() as server:
            yield Finding("server", Status.PASS, f"started, and was ready at {server.url}")
    except ConnectionError as error:
        yield Finding(
            "server", Status.FAIL, str(error), "run `python -m rollgym.env_server --port 0` to see more"
        )
