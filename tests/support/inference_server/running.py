"""Start doubles from tests: in a thread of the test's process, or in a process that can be killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tests.support.inference_server.app import NEWEST, Dialect, Served, application
from tests.support.inference_server.http import Options
from tests.support.processes import end

ROOT = Path(__file__).parents[3]


class Steering:
    """What a test asks of a double, over HTTP, wherever it runs."""

    url: str

    def _post(self, path: str, body: Any) -> None:
        httpx.post(f"{self.url}/_test/{path}", json=body, timeout=30).raise_for_status()

    def state(self) -> dict[str, Any]:
        """Numbers of now."""
        return dict(httpx.get(f"{self.url}/_test/state", timeout=30).json())

    def log(self) -> dict[str, Any]:
        """All replies that ended, as the engine drew them."""
        return dict(httpx.get(f"{self.url}/_test/log", timeout=30).json())

    def received(self) -> list[tuple[str, str]]:
        """Names and digests of the tensors that came since this was last asked."""
        return [tuple(each) for each in httpx.get(f"{self.url}/_test/received", timeout=30).json()]

    async def until(self, **numbers: int) -> dict[str, Any]:
        """Wait until each number of the state is at least the given one."""
        async with httpx.AsyncClient(timeout=40) as client:
            reply = await client.get(f"{self.url}/_test/wait", params=numbers)
            return dict(reply.raise_for_status().json())

    def steps(self, count: int | None) -> None:
        """Allow that many decoding steps more, any number for None."""
        self._post("steps", {"steps": count})

    def fail(self, *faults: dict[str, Any]) -> None:
        """Plan faults instead of those that were planned."""
        self._post("faults", list(faults))

    def weights(self, **how: bool) -> None:
        """Plan what becomes of the next update: `wrong`, `fail`; or `forget_version` now."""
        self._post("weights", how)

    def script(self, *replies: str | list[int]) -> None:
        """Let the next replies say these."""
        self._post("script", {"replies": list(replies)})

    def models(self) -> set[str]:
        """Names that may be asked for."""
        return {each["id"] for each in httpx.get(f"{self.url}/v1/models", timeout=30).json()["data"]}

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ids after the first, with the weights of now."""
        reply = httpx.post(f"{self.url}/_test/logprobs", json={"ids": list(ids)}, timeout=30)
        return list(reply.raise_for_status().json()["logprobs"])


class InferenceServer(Steering):
    """A double in a thread, for the length of a `with`.

    Args:
        dialect: "vllm" or "sglang".
        release: Its version string.
        model: A folder in Hugging Face layout; None for the hash model.
        seed: Of the hash model's weights.
        max_length: Longest row; None for the model's own.
        max_rows: Rows that are decoded at once.
        step_s: Seconds that each decoding step takes at least.
        quantization: How the weights of the folder are rounded; None for not at all.
        options: See `Options`.
    """

    def __init__(
        self,
        dialect: Dialect,
        release: str | None = None,
        *,
        model: Path | None = None,
        seed: int = 0,
        max_length: int | None = None,
        max_rows: int = 256,
        step_s: float = 0.0,
        quantization: str | None = None,
        **options: Any,
    ) -> None:
        self.dialect = dialect
        switches = Options(release or NEWEST[dialect], **options)
        self._served = Served(
            dialect, switches, model, seed, max_length, max_rows, step_s, quantization=quantization
        )

    def __enter__(self) -> InferenceServer:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            application(self._served), log_level="error", loop="asyncio", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[listener])), daemon=True
        )
        self._thread.start()
        httpx.get(f"{self.url}/_test/state", timeout=30).raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)


class InferenceServerProcess(Steering):
    """A double in a process of its own, on one port for all its lives.

    Args:
        dialect: "vllm" or "sglang".
        arguments: More of its command line.
        port: Where it listens; a free one if absent.
    """

    def __init__(self, dialect: Dialect, *arguments: str, port: int | None = None) -> None:
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        self.port = port
        self.dialect = dialect
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> InferenceServerProcess:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "tests.support.inference_server", "--dialect", self.dialect]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), *self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "serving on" not in line:
            self.stop()
            raise RuntimeError(f"the double did not start: {line!r}")
        return self

    def stand_still(self) -> None:
        """Let it do nothing, its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self.stop()

    def stop(self) -> None:
        """End it as an operator would."""
        if self._process is not None:
            with self._process as process:
                self._process = None
                end(process)

    def __enter__(self) -> InferenceServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
