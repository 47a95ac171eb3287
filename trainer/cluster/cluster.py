"""The machines for a run's roles, this machine or a Ray cluster, for as long as the context is open."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from transformers import PreTrainedModel

from rollgym.extras import install_line
from rollgym.trainer.backends.transport import RankTransport
from rollgym.trainer.cluster.placement import Placement
from rollgym.trainer.cluster.process import Lost
from rollgym.trainer.cluster.remote_engine import RemoteEngines
from rollgym.trainer.cluster.roles import LocalRoles, RayRoles, logs_of
from rollgym.trainer.cluster.server_host import HostedProgram
from rollgym.trainer.cluster.supervision import Disconnection, RoleRestarts
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.shutdown import run_shielded

if TYPE_CHECKING:
    from rollgym.trainer.cluster.ray_runtime import RayCluster

_T = TypeVar("_T")


class Cluster(Protocol):
    """Starts the processes of roles on their devices of the placement.

    Attributes:
        placement: The placement of the roles.
    """

    placement: Placement

    @property
    def here(self) -> str:
        """The address of this process's machine, as the processes of roles reach it."""
        ...

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role and carries calls to them."""
        ...

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start the embedded engines as processes of their own; None if they are in the driver's process.

        A further call returns the running engines: they outlive the attempt that started them.

        Args:
            build: Builds the model; it can be pickled.

        Raises:
            RoleDiedError: If an engine does not start.
        """
        ...

    async def servers(self, program: HostedProgram) -> list[str] | None:
        """Start the inference servers on the role's devices, and return their addresses; None if the run starts them.

        Raises:
            RunError: If one does not start.
        """
        ...

    async def judge(self, name: str) -> str:
        """Start a judge on its devices, and return its address.

        Raises:
            RunError: If it does not start.
        """
        ...

    def server_arguments(self) -> Sequence[str]:
        """Return arguments of `roll-serve` that place its environments in the role's workers."""
        ...


@asynccontextmanager
async def open_cluster(
    settings: RunSettings,
    placement: Placement,
    lost: Lost,
    say: Callable[[str], None],
    restarts: RoleRestarts | None = None,
) -> AsyncIterator[Cluster]:
    """Connect to the machines that a run's roles start on; their processes end with the context.

    Args:
        settings: The run.
        placement: The placement of its roles.
        lost: Notified of processes that died and are not restarted in place.
        say: Receives messages for people about waiting for the cluster, and about roles that die and return.
        restarts: Says how often a role is started again; by default as the settings say, counted in a row.

    Raises:
        ConfigError: If the cluster is unreachable, or lacks the devices.
    """
    if settings.cluster.kind == "local":
        cluster = LocalRoles(settings, placement, lost)
        try:
            yield cluster
        finally:
            await run_shielded(cluster.close())
        return
    async with _connected(settings, placement, say) as ray:
        roles = RayRoles(settings, placement, ray, restarts or role_restarts(settings), lost, say)
        watch = asyncio.ensure_future(roles.watch_head())
        try:
            yield roles
        finally:
            watch.cancel()
            await run_shielded(roles.close())


def role_restarts(settings: RunSettings) -> RoleRestarts:
    """Return what counts the restarts of a run's roles that saves no checkpoints."""
    return RoleRestarts(settings.cluster.restarts, settings.cluster.restart_after_s, lambda: 0)


@asynccontextmanager
async def _connected(
    settings: RunSettings, placement: Placement, say: Callable[[str], None]
) -> AsyncIterator["RayCluster"]:
    """Connect to Ray, and reserve the devices."""
    ray = _ray_cluster(settings, placement)
    stop = threading.Event()
    # Ray ends a cluster that it has started when the thread does that it was started from.
    with ThreadPoolExecutor(1, "ray") as thread:
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(say, text)

        try:
            await run_shielded(_in(loop, thread, ray.connect))
            ray.take_back_signals()
            waiting = loop.run_in_executor(thread, lambda: _reserve(ray, settings, placement, stop, tell))
            say(f"connected to Ray at {ray.address}; waiting for the devices")
            await waiting
            yield ray
        finally:
            stop.set()
            disconnection = await run_shielded(_in(loop, thread, ray.disconnect))
            if disconnection is Disconnection.UNANSWERED:
                say(f"the Ray cluster at {ray.address} does not answer and is left as it is")


async def _in(loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    return await loop.run_in_executor(thread, work)


def _reserve(
    ray: "RayCluster",
    settings: RunSettings,
    placement: Placement,
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    named = settings.model.device
    accelerators = None if named == "auto" else named.partition(":")[0] != "cpu"
    timeout_s = settings.cluster.start_timeout_s
    ray.reserve(placement, accelerators=accelerators, timeout_s=timeout_s, stop=stop, say=say)


def _ray_cluster(settings: RunSettings, placement: Placement) -> "RayCluster":
    try:
        from rollgym.trainer.cluster.ray_runtime import (
            RayCluster,  # Imported late: a local run needs no Ray.
        )
    except ImportError as error:
        raise ConfigError(
            f"cluster.kind 'ray' needs the package ray: {install_line('ray')}, or set cluster.kind=local"
        ) from error
    workers = settings.cluster.roles.environment
    cpus = placement.devices_per_node + (0.0 if workers is None else workers.actors * workers.cpus)
    return RayCluster(settings.cluster.address, cpus, settings.cluster.working_dir, logs_of(settings))
