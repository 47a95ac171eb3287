"""Roles of a run as processes of this machine."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from rollgym.trainer.backends.local_ranks import LocalRanks
from rollgym.trainer.backends.transport import RankTransport
from rollgym.trainer.cluster.kept_process import Lost
from rollgym.trainer.cluster.placement import ACTOR_TRAIN, Placement
from rollgym.trainer.cluster.remote_engine import RemoteEngines
from rollgym.trainer.cluster.server_host import JudgeProgram, Program, ServerHost
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import RoleLostError

RANKS_FOLDER = "ranks"
"""Name of the folder in a run's directory with the logs of its roles' processes, a file each."""


def logs_of(settings: RunSettings) -> Path:
    """Return the folder with the logs of a run's role processes."""
    return Path(settings.output_dir).absolute() / RANKS_FOLDER


class LocalRoles:
    """Starts the roles as processes of this machine.

    Args:
        settings: The run.
        placement: The placement of its roles.
        lost: Notified of a judge that ends repeatedly.
    """

    def __init__(self, settings: RunSettings, placement: Placement, lost: Lost) -> None:
        self._settings = settings
        self.placement = placement
        self._lost = lost
        self._judges: list[ServerHost] = []
        self._watches: list[asyncio.Task[None]] = []

    @property
    def here(self) -> str:
        """The loopback: everything is on this machine."""
        return "127.0.0.1"

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role as child processes."""
        named = self.placement.role(role)
        logs = logs_of(self._settings)
        return LocalRanks(
            logs if role == ACTOR_TRAIN else logs / role,
            self._settings.threads,
            () if named is None else named.devices,
            role,
            self._settings.cluster.start_timeout_s,
        )

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start nothing: the engine is in the driver's process."""
        return None

    async def servers(self, program: Program) -> list[str] | None:
        """Start none: the run starts them as its own processes."""
        return None

    async def judge(self, name: str) -> str:
        """Start a judge as a child process, and restart it whenever it ends."""
        role = self.placement.role(name)
        assert role is not None
        program = JudgeProgram(name, self._settings.cluster.roles.judges[name], role.devices)
        host = ServerHost(program, 0, "127.0.0.1", logs_of(self._settings))
        self._judges.append(host)
        url = await host.start()
        self._watches.append(asyncio.ensure_future(self._watch(name, host)))
        return url

    def server_arguments(self) -> Sequence[str]:
        """Return none: the server has workers of its own."""
        return []

    async def close(self) -> None:
        """Stop the judges and their restarts."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for judge in self._judges:
            await judge.stop()

    async def _watch(self, name: str, host: ServerHost) -> None:
        self._lost(RoleLostError(name, "", f"judge {name}: {await host.gone()}"))
