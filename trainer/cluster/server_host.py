"""Servers of roles: their programs and command lines, and the process that keeps one on its node."""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollgym.trainer.config.cluster import JudgeSettings
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.servers.dialect import ServedModel
from rollgym.trainer.inference.servers.launch import ServerProcess, choose_ports, launched, server_processes
from rollgym.trainer.inference.servers.parent_guard import GRACE_S

_PORT_PATIENCE_S = 2 * GRACE_S
_LOOK_EVERY_S = 0.2


class HostedProgram(Protocol):
    """A server's program. It can be pickled, and chooses its port on the machine that runs it."""

    @property
    def launch(self) -> LaunchSettings:
        """Return the settings of the launch."""
        ...

    def process(self, number: int, host: str, logs: Path, port: int | None = None) -> ServerProcess:
        """Return the process of server `number` on a node that others reach at `host`.

        Args:
            number: The server's number in its role.
            host: Address of its node.
            logs: Folder of its logs.
            port: Its port; chosen if None.

        Raises:
            ConfigError: If its port is taken.
        """
        ...


@dataclass(frozen=True, slots=True)
class InferenceProgram:
    """A server that samples from the policy.

    Attributes:
        inference: The kind of server, and its requirements.
        launch: Settings of the launch.
        model: The model that it serves.
    """

    inference: InferenceSettings
    launch: LaunchSettings
    model: ServedModel

    def process(self, number: int, host: str, logs: Path, port: int | None = None) -> ServerProcess:
        """Return the process of server `number`."""
        if port is None and self.launch.port is not None:
            port = self.launch.port + number
        launch = self.launch.model_copy(update={"host": host, "port": port, "count": 1, "devices": []})
        (process,) = server_processes(
            self.inference, launch, self.model, choose_ports(launch), logs / str(number)
        )
        return process


@dataclass(frozen=True, slots=True)
class JudgeProgram:
    """A server that judges.

    Attributes:
        name: The judge's name.
        judge: Its settings.
        devices: Devices of this machine that it sees; those of the process that starts it if none are named.
    """

    name: str
    judge: JudgeSettings
    devices: tuple[int, ...] = ()

    @property
    def launch(self) -> LaunchSettings:
        """Return the settings of the launch."""
        return LaunchSettings(startup_timeout_s=self.judge.startup_timeout_s)

    def process(self, number: int, host: str, logs: Path, port: int | None = None) -> ServerProcess:
        """Return the server's process, not started yet."""
        (port,) = choose_ports(self.launch.model_copy(update={"host": host, "port": port}))
        filled = {"{model}": self.judge.model, "{host}": host, "{port}": str(port)}
        command = list(self.judge.command)
        for place, value in filled.items():
            command = [word.replace(place, value) for word in command]
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))} if self.devices else {}
        log = logs / f"judge-{self.name}.log"
        return ServerProcess(
            tuple(command), f"http://{host}:{port}", log, seen, f"server of judge {self.name}"
        )


class ServerHost:
    """Keeps a server on this node; the server ends with this process, however it ends.

    Args:
        program: The server's program.
        number: The server's number in its role.
        host: Address of this node, as others reach it.
        logs: Folder of the server's logs.
        port: Its port, if clients know it already; waits until a previous process has released it.
    """

    def __init__(
        self, program: HostedProgram, number: int, host: str, logs: Path, port: int | None = None
    ) -> None:
        self._program = program
        self._number = number
        self._host = host
        self._logs = logs
        self._port = port
        self._stack = AsyncExitStack()
        self._gone = asyncio.Event()
        self._last_words = ""

    async def start(self) -> str:
        """Start the server and return its address once it answers.

        Raises:
            LaunchError: If it ends before it answers, or takes too long.
            ConfigError: If its port is taken.
        """
        launch = self._program.launch
        running = launched(
            [await self._process()],
            startup_timeout_s=launch.startup_timeout_s,
            restarts=launch.restarts,
            say=_say,
            status=lambda _: None,
            gone=self._ended,
        )
        (url,) = await self._stack.enter_async_context(running)
        return url

    async def gone(self) -> str:
        """Wait until the server has ended by itself once too often, and return what is to be said of it."""
        await self._gone.wait()
        return self._last_words

    async def stop(self) -> None:
        """Stop the server and its restarts."""
        await self._stack.aclose()

    async def _process(self) -> ServerProcess:
        until = time.monotonic() + (0.0 if self._port is None else _PORT_PATIENCE_S)
        while True:
            try:
                return self._program.process(self._number, self._host, self._logs, self._port)
            except ConfigError:
                # The one before, whose host was killed, may still be ending.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_LOOK_EVERY_S)

    def _ended(self, what: str) -> None:
        self._last_words = what
        self._gone.set()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
