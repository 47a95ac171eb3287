"""The processes that a run's roles are, on this machine or on a Ray cluster, for as long as it is open."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel

from trainer.backends.local_ranks import LocalRanks
from trainer.backends.transport import RankTransport, pack
from trainer.cluster.placement import ACTOR_INFERENCE, ACTOR_TRAIN, Placement, Role
from trainer.cluster.process import ActorRanks, RoleProcess
from trainer.cluster.remote_engine import RemoteEngines, answer_of
from trainer.cluster.server_host import JudgeProgram, Program, ServerHost
from trainer.config.run import RunSettings
from trainer.core.ending import to_its_end
from trainer.core.errors import ConfigError, RoleDiedError

if TYPE_CHECKING:
    from trainer.cluster.ray_runtime import RayCluster

OnDeath = Callable[[RoleDiedError], None]
"""Told, in the event loop, of a process that ended without being asked to."""

RANKS_FOLDER = "ranks"
"""Name of the folder in a run's directory where the processes of its roles say what they do, a file each."""


class Cluster(Protocol):
    """Starts the processes of roles where the placement has them.

    Attributes:
        placement: Where the roles are.
    """

    placement: Placement

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role and carries calls to them."""
        ...

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start the embedded engines as processes of their own; None where they are in the driver's process.

        Args:
            build: Builds the model; it can be packed.

        Raises:
            RoleDiedError: If one does not start.
        """
        ...

    async def servers(self, program: Program) -> list[str] | None:
        """Start the role's inference servers on its devices, and return their addresses; None where the run does it.

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
        """Return words of `roll-serve` that bring its environments to the role's workers."""
        ...


class LocalCluster:
    """Processes of this machine.

    Args:
        settings: The run.
        placement: Where its roles are.
    """

    def __init__(self, settings: RunSettings, placement: Placement) -> None:
        self._settings = settings
        self.placement = placement
        self._judges: list[ServerHost] = []

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role as child processes."""
        named = self.placement.role(role)
        logs = _logs(self._settings)
        return LocalRanks(
            logs if role == ACTOR_TRAIN else logs / role,
            self._settings.threads,
            () if named is None else named.devices,
        )

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start none: the engine is in the driver's process."""
        return None

    async def servers(self, program: Program) -> list[str] | None:
        """Start none: the run starts them as its own processes."""
        return None

    async def judge(self, name: str) -> str:
        """Start a judge as a process of this one."""
        role = self.placement.role(name)
        assert role is not None
        program = JudgeProgram(name, self._settings.cluster.roles.judges[name], role.devices)
        host = ServerHost(program, 0, "127.0.0.1", _logs(self._settings))
        self._judges.append(host)
        return await host.start()

    def server_arguments(self) -> Sequence[str]:
        """Return none: the server has workers of its own."""
        return []

    async def close(self) -> None:
        """End the judges."""
        for judge in self._judges:
            await judge.stop()


class RayRoles:
    """Actors of a Ray cluster.

    Args:
        settings: The run.
        placement: Where its roles are.
        ray: The connection, with room for them.
        on_death: Told of actors that die.
    """

    def __init__(
        self, settings: RunSettings, placement: Placement, ray: "RayCluster", on_death: OnDeath
    ) -> None:
        self._settings = settings
        self.placement = placement
        self._ray = ray
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._processes: list[RoleProcess] = []

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role as actors, each where its device is."""
        return ActorRanks(role, lambda rank, world_size: self._started_rank(role, rank, world_size))

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start an engine on each device of the role."""
        role = self.placement.role(ACTOR_INFERENCE)
        if role is None or role.does != "engine":
            return None
        settings = self._settings
        arguments = (
            build,
            settings.rollout.max_concurrent_sequences,
            settings.model.max_length,
            settings.threads,
        )
        maker = "trainer.cluster.engine_server:EngineServer"
        starts = [
            asyncio.to_thread(self._started, ACTOR_INFERENCE, number, maker, arguments)
            for number in range(len(role.processes))
        ]
        return RemoteEngines(await to_its_end(_all(starts)))

    async def servers(self, program: Program) -> list[str] | None:
        """Start each server where its devices are."""
        role = self.placement.role(ACTOR_INFERENCE)
        assert role is not None
        return await _all([self._served(role, number, program) for number in range(len(role.processes))])

    async def judge(self, name: str) -> str:
        """Start a judge where its devices are."""
        role = self.placement.role(name)
        assert role is not None
        return await self._served(role, 0, JudgeProgram(name, self._settings.cluster.roles.judges[name]))

    async def _served(self, role: Role, number: int, program: Program) -> str:
        host = self._ray.address_of(role.processes[number][0])
        arguments = (program, number, host, _logs(self._settings))
        maker = "trainer.cluster.server_host:ServerHost"
        process = await to_its_end(asyncio.to_thread(self._started, role.name, number, maker, arguments))
        url: str = await answer_of(process.call(pack(("start", ()))))
        return url

    def server_arguments(self) -> Sequence[str]:
        """Return what has the server's environments run in actors of this cluster."""
        workers = self._settings.cluster.roles.environment
        if workers is None:
            return []
        words = ["--workers", "ray", "--ray-address", self._ray.address]
        words += ["--ray-max-actors", str(workers.actors), "--ray-num-cpus", f"{workers.cpus:g}"]
        judges = self._settings.cluster.roles.judges
        here = {
            task.env_id for task in self._settings.tasks if task.url is None and task.env_id not in judges
        }
        for env_id in sorted(here):
            words += ["--isolation", f"{env_id}=process"]
        return words

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()

    def _started_rank(self, role: str, rank: int, world_size: int) -> RoleProcess:
        host = "trainer.cluster.rank_server:NodeRankServer"
        named = self.placement.role(role)
        assert named is not None
        address = self._ray.address_of(named.processes[0][0])
        return self._started(role, rank, host, (rank, world_size, address))

    def _started(self, role: str, number: int, maker: str, arguments: tuple[Any, ...]) -> RoleProcess:
        named = self.placement.role(role)
        assert named is not None
        environment = {"OMP_NUM_THREADS": str(self._settings.threads), "PYTHONUNBUFFERED": "1"}
        if len(self.placement.used_nodes()) == 1:
            # Otherwise gloo looks the host's own name up, which need not lead back to this machine.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        process = self._ray.start(role, number, named.processes[number], maker, arguments, environment)
        self._processes.append(process)
        process.on_death(self._tell)
        return process

    def _tell(self, died: RoleDiedError) -> None:
        self._loop.call_soon_threadsafe(self._on_death, died)


async def _all(works: Sequence[Any]) -> list[Any]:
    """The results of all, once none is at work any more."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@asynccontextmanager
async def open_cluster(
    settings: RunSettings, placement: Placement, on_death: OnDeath, say: Callable[[str], None]
) -> AsyncIterator[Cluster]:
    """Connect to what the roles of a run are started on; their processes end with the context.

    Args:
        settings: The run.
        placement: Where its roles are.
        on_death: Told of processes that die.
        say: Told of a cluster that is waited for.

    Raises:
        ConfigError: If there is no such cluster, or it does not have the devices.
    """
    if settings.cluster.kind == "local":
        cluster = LocalCluster(settings, placement)
        try:
            yield cluster
        finally:
            await to_its_end(cluster.close())
        return
    ray = _ray_cluster(settings, placement)
    stop = threading.Event()
    # Ray ends a cluster that it has started when the thread does that it was started from.
    with ThreadPoolExecutor(1, "ray") as thread:
        loop = asyncio.get_running_loop()
        try:
            await to_its_end(_in(loop, thread, ray.connect))
            ray.take_back_signals()
            waiting = loop.run_in_executor(thread, lambda: _reserve(ray, settings, placement, stop))
            say(f"connected to Ray at {ray.address}; waiting for the devices")
            await waiting
            roles = RayRoles(settings, placement, ray, on_death)
            try:
                yield roles
            finally:
                await to_its_end(asyncio.to_thread(roles.close))
        finally:
            stop.set()
            await to_its_end(_in(loop, thread, ray.disconnect))


async def _in(loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    await loop.run_in_executor(thread, work)


def _reserve(ray: "RayCluster", settings: RunSettings, placement: Placement, stop: threading.Event) -> None:
    named = settings.model.device
    accelerators = None if named == "auto" else named.partition(":")[0] != "cpu"
    ray.reserve(placement, accelerators=accelerators, timeout_s=settings.cluster.start_timeout_s, stop=stop)


def _ray_cluster(settings: RunSettings, placement: Placement) -> "RayCluster":
    try:
        from trainer.cluster.ray_runtime import RayCluster  # Imported late: who trains here has no Ray.
    except ImportError as error:
        raise ConfigError(
            "cluster.kind 'ray' needs the package ray: pip install 'rollgym[ray]', or set cluster.kind=local"
        ) from error
    workers = settings.cluster.roles.environment
    cpus = placement.devices_per_node + (0.0 if workers is None else workers.actors * workers.cpus)
    return RayCluster(settings.cluster.address, cpus, settings.cluster.working_dir, _logs(settings))


def _logs(settings: RunSettings) -> Path:
    return Path(settings.output_dir).absolute() / RANKS_FOLDER
