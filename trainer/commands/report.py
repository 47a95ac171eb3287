"""`roll-train report RUN`: the page of a run, written to a file or served while the run is in progress."""

import socket
import sys
import webbrowser
from pathlib import Path

import uvicorn

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import write_errors
from rollgym.trainer.evaluation.reporting.live import LivePage
from rollgym.trainer.evaluation.reporting.page import render_page
from rollgym.trainer.evaluation.reporting.run_folder import read_run

REPORT_FILE = "report.html"
"""The page's name in a run's directory, unless --output names another."""


def report(directory: Path, output: Path | None, *, open_page: bool) -> int:
    """Write the page of a run.

    Raises:
        NoRunError: If the directory holds none.
        WriteError: If the page cannot be written.
    """
    page = render_page(read_run(directory))
    path = directory / REPORT_FILE if output is None else output
    with write_errors(path):
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    _say(f"report: {path} ({len(page) / 2**20:.1f} MiB)")
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    return 0


def serve(directory: Path, port: int, *, open_page: bool) -> int:
    """Serve the page of a run on loopback until it is interrupted.

    Raises:
        NoRunError: If the directory holds none.
        ConfigError: If the port is taken.
    """
    read_run(directory)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}; name another, or 0 for any that is free"
            ) from error
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        _say(f"the page of {directory} follows the run on {url} (Ctrl-C ends it)")
        if open_page:
            webbrowser.open(url)
        # Streams of open pages have no end of their own.
        config = uvicorn.Config(
            LivePage(directory).application(),
            log_level="warning",
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
