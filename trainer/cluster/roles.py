"""Roles of a run: as processes of this machine, or as actors of a Ray cluster.

All but the ranks of models are restarted in place.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from rollgym.trainer.backends.local_ranks import LocalRanks
from rollgym.trainer.backends.transport import RankTransport, pack
from rollgym.trainer.cluster.placement import ACTOR_INFERENCE, ACTOR_TRAIN, Placement, Role
from rollgym.trainer.cluster.process import ActorRanks, KeptProcess, Lost, RoleProcess
from rollgym.trainer.cluster.remote_engine import RemoteEngines
from rollgym.trainer.cluster.server_host import HostedProgram, JudgeProgram, ServerHost
from rollgym.trainer.cluster.supervision import RoleRestarts
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError, RoleDiedError, RoleLostError, RunError, TrainerError
from rollgym.trainer.core.shutdown import run_shielded

if TYPE_CHECKING:
    from rollgym.trainer.cluster.ray_runtime import RayCluster


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

    async def servers(self, program: HostedProgram) -> list[str] | None:
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


_RANK = "rollgym.trainer.backends.rank:NodeRankServer"
_ENGINE = "rollgym.trainer.cluster.engine_server:EngineServer"
_SERVER = "rollgym.trainer.cluster.server_host:ServerHost"
_LOOK_AT_HEAD_EVERY_S = 3.0
_HEAD_PATIENCE = 4


class RayRoles:
    """Starts the roles as actors of a Ray cluster.

    Model ranks are not restarted in place: the death of one loses its weights, and the trainer returns to a checkpoint.
    Engines, servers and judges are restarted in place.

    Args:
        settings: The run.
        placement: The placement of its roles.
        ray: The connection, with devices reserved for them.
        restarts: Says how often they are restarted.
        lost: Notified of deaths without a restart: of a rank, of a role that died too often, or of its whole machine.
        say: Receives messages for people about deaths and restarts.
    """

    def __init__(
        self,
        settings: RunSettings,
        placement: Placement,
        ray: "RayCluster",
        restarts: RoleRestarts,
        lost: Lost,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self.placement = placement
        self._ray = ray
        self._restarts = restarts
        self._lost = lost
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._processes: list[RoleProcess] = []
        self._kept: list[KeptProcess] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._engines: RemoteEngines | None = None
        self._servers: list[str] | None = None
        self._head_is_gone = False

    @property
    def here(self) -> str:
        """The address of this process's machine, as the nodes of the roles reach it."""
        return self._ray.here

    def ranks(self, role: str) -> RankTransport:
        """Return what starts the ranks of a role as actors, each on the node of its device."""
        return ActorRanks(
            role,
            lambda rank, world_size: self._started_rank(role, rank, world_size),
            self._tell,
            self._end,
        )

    async def engines(self, build: Callable[[], PreTrainedModel]) -> RemoteEngines | None:
        """Start an engine on each device of the role, unless they run already."""
        role = self.placement.role(ACTOR_INFERENCE)
        if role is None or role.does != "engine":
            return None
        if self._engines is not None:
            await self._engines.start_anew()
            return self._engines
        rollout, longest = self._settings.rollout, self._settings.model.max_length
        arguments = (build, rollout.max_concurrent_sequences, longest, self._settings.threads)

        def starting(number: int) -> Callable[[], Coroutine[Any, Any, RoleProcess]]:
            return lambda: self._start(ACTOR_INFERENCE, number, _ENGINE, arguments)

        engines = [self._keep(role.name, starting(number)) for number in range(len(role.processes))]
        await run_shielded(_all([engine.open() for engine in engines]))
        self._engines = RemoteEngines(engines)
        return self._engines

    async def servers(self, program: HostedProgram) -> list[str] | None:
        """Start each server on the node of its devices, unless it runs already."""
        role = self.placement.role(ACTOR_INFERENCE)
        assert role is not None
        if self._servers is None:
            starts = [self._served(role, number, program) for number in range(len(role.processes))]
            self._servers = await _all(starts)
        return self._servers

    async def judge(self, name: str) -> str:
        """Start a judge on the node of its devices."""
        role = self.placement.role(name)
        assert role is not None
        return await self._served(role, 0, JudgeProgram(name, self._settings.cluster.roles.judges[name]))

    def server_arguments(self) -> Sequence[str]:
        """Return what has the server's environments run in actors of this cluster."""
        workers = self._settings.cluster.roles.environment
        if workers is None:
            return []
        words = ["--workers", "ray", "--ray-address", self._ray.address]
        words += ["--ray-max-actors", str(workers.actors), "--ray-num-cpus", f"{workers.cpus:g}"]
        if (directory := self._settings.cluster.working_dir) is not None:
            words += ["--ray-working-dir", directory]
        judges = self._settings.cluster.roles.judges
        here = {
            task.env_id for task in self._settings.tasks if task.url is None and task.env_id not in judges
        }
        for env_id in sorted(here):
            words += ["--isolation", f"{env_id}=process"]
        return words

    async def close(self) -> None:
        """End all actors that this run started."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(kept.leave() for kept in self._kept))
        await asyncio.gather(*(asyncio.to_thread(self._end, process) for process in self._processes))

    async def watch_head(self) -> None:
        """Detect the death of the cluster's head before Ray does: a minute later Ray ends this process."""
        misses = 0
        while misses < _HEAD_PATIENCE:
            await asyncio.sleep(_LOOK_AT_HEAD_EVERY_S)
            misses = 0 if await self._ray.head_answers() else misses + 1
        self._head_is_gone = True
        self._lost(
            RunError(
                f"the head of the Ray cluster at {self._ray.address} is gone, and with it all roles: start it again "
                "(`ray start --head`), and all other nodes with it"
            )
        )

    def _keep(self, role: str, start: Callable[[], Coroutine[Any, Any, RoleProcess]]) -> KeptProcess:
        kept = KeptProcess(role, start, self._restarts, self._lost, self._say)
        self._kept.append(kept)
        return kept

    async def _served(self, role: Role, number: int, program: HostedProgram) -> str:
        """Start a server, in a process that is started again with the server at the same address."""
        host = self._ray.address_of(role.name, role.processes[number][0])
        urls: list[str] = []

        async def start() -> RoleProcess:
            port = int(urls[0].rpartition(":")[2]) if urls else None
            arguments = (program, number, host, logs_of(self._settings), port)
            process = await self._start(role.name, number, _SERVER, arguments)
            urls.append(await kept.answer(process, pack(("start", ()))))
            self._watch(role.name, kept, process)
            return process

        kept = self._keep(role.name, start)
        await kept.open()
        return urls[0]

    def _watch(self, role: str, kept: KeptProcess, process: RoleProcess) -> None:
        """End the run if a server ends repeatedly, though its host is alive."""

        async def gone() -> None:
            try:
                what = await kept.answer(process, pack(("gone", ())))
            except TrainerError:
                return  # its host has died: a restart follows
            self._lost(RoleLostError(role, "", f"{role}: {what}"))

        watch = asyncio.ensure_future(gone())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _started_rank(self, role: str, rank: int, world_size: int) -> RoleProcess:
        named = self.placement.role(role)
        assert named is not None
        address = self._ray.address_of(role, named.processes[0][0])
        process = self._started(role, rank, _RANK, (rank, world_size, address))
        self._require_shared(role, process, named.processes[rank][0])
        return process

    def _require_shared(self, role: str, process: RoleProcess, device: int) -> None:
        """Refuse a run whose directory is a different one on its ranks' machines.

        Raises:
            ConfigError: If a rank does not see what this process has written there.
        """
        if self._ray.is_beside(device):
            return
        folder = Path(self._settings.output_dir).absolute()
        known = next((each for each in sorted(folder.iterdir()) if each.is_file()), None)
        if known is None or process.sees(str(known)):
            return
        raise ConfigError(
            f"output_dir {folder} is not the same folder on node {process.node}, where a rank of {role} is: "
            "checkpoints, weights and the model are written there by whoever has them, so name one on a disk that all "
            "nodes mount"
        )

    async def _start(self, role: str, number: int, maker: str, arguments: tuple[Any, ...]) -> RoleProcess:
        return await run_shielded(asyncio.to_thread(self._started, role, number, maker, arguments))

    def _started(self, role: str, number: int, maker: str, arguments: tuple[Any, ...]) -> RoleProcess:
        named = self.placement.role(role)
        assert named is not None
        environment = {"OMP_NUM_THREADS": str(self._settings.threads), "PYTHONUNBUFFERED": "1"}
        if named.does == "rank" and self._ray.address_of(role, named.processes[0][0]) == "127.0.0.1":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        process = self._ray.start(role, number, named.processes[number], maker, arguments, environment)
        self._processes.append(process)
        return process

    def _end(self, process: RoleProcess) -> None:
        if not self._head_is_gone:  # without the head node no call reaches them, and they end by themselves
            process.end()

    def _tell(self, died: RoleDiedError) -> None:
        self._loop.call_soon_threadsafe(self._lost, died)


async def _all(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return all results, once all calls have ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
