"""The page of a run (`roll-train report RUN`), written to a file, or served on loopback while the run is in progress.

The served page follows the run: it is rebuilt whenever the run's files have grown.
"""

import asyncio
import socket
import sys
import time
import webbrowser
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import ADAPTER_FOLDER, CONFIG_FILE, LOCK_FILE, MODEL_FOLDER, write_errors
from rollgym.trainer.evaluation.reporting.page import render_page
from rollgym.trainer.evaluation.reporting.run_folder import NoRunError, read_run
from rollgym.trainer.learn.tracking import EPISODES_FILE, METRICS_FILE
from rollgym.trainer.records.ledger import LEDGER_FILE

_FILES = (CONFIG_FILE, METRICS_FILE, EPISODES_FILE, LEDGER_FILE, LOCK_FILE, MODEL_FOLDER, ADAPTER_FOLDER)
_LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})

_REST = 10
"""How many times as long as the page took to make nothing new is looked for."""

Stamp = tuple[tuple[int, int], ...]


class LivePage:
    """Serves one run.

    Args:
        directory: The run's directory.
        look_s: Interval of the checks for new data in its files, which another process writes.
    """

    def __init__(self, directory: Path, look_s: float = 1.0) -> None:
        self._directory = directory
        self._look_s = look_s
        self._made: tuple[Stamp, bytes] | None = None
        self._took_s = 0.0
        self._making = asyncio.Lock()

    def application(self) -> Starlette:
        """Return the ASGI application that serves the page."""
        return Starlette(routes=[Route("/", self.page), Route("/events", self.events)])

    async def page(self, request: Request) -> Response:
        """Answer with the page as the files are now."""
        if (refusal := _refused(request)) is not None:
            return refusal
        async with self._making:
            stamp = await asyncio.to_thread(self._stamp)
            if self._made is None or self._made[0] != stamp:
                try:
                    began = time.monotonic()
                    made = await asyncio.to_thread(self._render)
                    self._took_s = time.monotonic() - began
                except NoRunError as error:
                    return PlainTextResponse(str(error), status_code=404)
                self._made = stamp, made
            content = self._made[1]
        return HTMLResponse(
            content, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        )

    async def events(self, request: Request) -> Response:
        """Answer with a stream that has an event whenever the files have changed."""
        if (refusal := _refused(request)) is not None:
            return refusal
        return StreamingResponse(
            self._changes(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        seen = await asyncio.to_thread(self._stamp)
        yield ": following\n\n"
        while not await request.is_disconnected():
            # A page that takes long to make must not take the machine from the run.
            await asyncio.sleep(max(self._look_s, _REST * self._took_s))
            if (stamp := await asyncio.to_thread(self._stamp)) != seen:
                seen = stamp
                yield "data: changed\n\n"

    def _stamp(self) -> Stamp:
        return tuple(_size_and_time(self._directory / name) for name in _FILES)

    def _render(self) -> bytes:
        return render_page(read_run(self._directory), live=True).encode("utf-8", "backslashreplace")


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)
    return status.st_size, status.st_mtime_ns


def _refused(request: Request) -> Response | None:
    """Refuse names that are not this machine's: a page of the web could have given itself ours (DNS rebinding)."""
    host = request.headers.get("host", "").rsplit(":", 1)
    name = host[0] if len(host) == 2 and host[1].isdecimal() else ":".join(host)
    return None if name in _LOCAL else PlainTextResponse("only by the address that the command names", 421)


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
            # Before anybody is told: a browser that comes before the server has started waits for it.
            listening.listen()
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
