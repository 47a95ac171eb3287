"""What of a run survives the death of a role: its cluster, its ranks, and all other roles."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import Ranks
from rollgym.trainer.cluster.cluster import Cluster, open_cluster, role_restarts
from rollgym.trainer.cluster.placement import Role, place_roles
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.embedded_server import ServerRestarts, embedded_server
from rollgym.trainer.core.errors import RoleDiedError, TrainerError
from rollgym.trainer.core.shutdown import GracefulShutdown, run_shielded
from rollgym.trainer.run.judges import open_judges


class RankGroups:
    """The ranks that shard a run's models: a group for each set of devices, which outlives an attempt at the run.

    It starts them, and keeps those that live: if one dies, only its group is started again.

    Args:
        settings: The run.
        cluster: Where the ranks run.
    """

    def __init__(self, settings: RunSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._groups: dict[tuple[int, ...], Ranks] = {}

    async def group(self, role: Role) -> Ranks:
        """Return the ranks of a role, which compute nothing yet. Roles on the very same devices share them.

        Raises:
            RankDiedError: If one does not start.
            ConfigError: If one has no device, or does not see the run's directory.
        """
        ranks = self._groups.get(role.devices)
        if ranks is None:
            mesh = mesh_shape(self._settings, len(role.devices))
            model, backend = self._settings.model, self._settings.backend
            ranks = Ranks(self._cluster.ranks(role.name), mesh, model.device, backend.timeout_s)
            await run_shielded(asyncio.to_thread(ranks.start))
            self._groups[role.devices] = ranks
        return ranks

    async def begin_anew(self) -> None:
        """Make live groups drop their models, and end all others."""
        for devices, ranks in list(self._groups.items()):
            try:
                self._groups[devices] = await run_shielded(asyncio.to_thread(ranks.begun_anew))
            except TrainerError:  # ranks of this group are dead, or do not know what the others wait for
                del self._groups[devices]
                await run_shielded(asyncio.to_thread(ranks.close))

    async def close(self) -> None:
        """End all rank groups; the next attempt starts new ones."""
        groups, self._groups = list(self._groups.values()), {}
        await run_shielded(_closed(groups))


async def _closed(groups: list[Ranks]) -> None:
    await asyncio.gather(*(asyncio.to_thread(ranks.close) for ranks in groups))


def mesh_shape(settings: RunSettings, ranks: int) -> MeshShape:
    """Return how `ranks` ranks share the work of a model."""
    mesh = settings.backend.mesh
    return MeshShape(ranks // mesh.model_ranks, mesh.tensor, mesh.pipeline, mesh.context, mesh.expert)


@dataclass(frozen=True, slots=True)
class _Opened:
    """The roles that are running now.

    Attributes:
        stack: Ends them.
        settings: The run's, with the judged tasks routed to the judges.
        cluster: Places the roles.
        groups: The ranks of its models.
    """

    stack: AsyncExitStack
    settings: RunSettings
    cluster: Cluster
    groups: RankGroups


class PersistentRoles:
    """The roles of a run, opened once, and kept across attempts at the run for as long as they live.

    Args:
        settings: The run.
        shutdown: Notified of roles whose death ends an attempt.

    Attributes:
        restarts: Says how often a role is started again.
    """

    def __init__(self, settings: RunSettings, shutdown: GracefulShutdown) -> None:
        self.restarts = role_restarts(settings)
        self._settings = settings
        self._shutdown = shutdown
        self._opened: _Opened | None = None
        self._environments: str | None = None

    @property
    def _there(self) -> _Opened:
        assert self._opened is not None
        return self._opened

    @property
    def settings(self) -> RunSettings:
        """The run's settings, with the judged tasks routed to the judges."""
        return self._there.settings

    @property
    def cluster(self) -> Cluster:
        """The cluster that places the roles."""
        return self._there.cluster

    @property
    def groups(self) -> RankGroups:
        """The ranks of the run's models."""
        return self._there.groups

    async def open(self) -> None:
        """Start what is not running: the cluster and the judges; ranks, engines and servers come when they are used.

        Raises:
            ConfigError: If the cluster is unreachable or has no room, or a judge is unused.
            RunError: If a judge does not start.
        """
        if self._opened is not None:
            await self._opened.groups.begin_anew()
            return
        async with AsyncExitStack() as stack:
            placement = place_roles(self._settings)
            opening = open_cluster(self._settings, placement, self._shutdown.end, self._say, self.restarts)
            cluster = await stack.enter_async_context(opening)
            settings = await open_judges(self._settings, cluster, self._served, stack, self._say)
            groups = RankGroups(self._settings, cluster)
            stack.push_async_callback(groups.close)
            self._opened = _Opened(stack.pop_all(), settings, cluster, groups)

    @asynccontextmanager
    async def serve(self, environments: Sequence[str]) -> AsyncIterator[str]:
        """Start an environment server that outlives the context, if there is none, and give its URL."""
        if self._environments is None:
            there = self._there
            serving = self._served(environments, there.cluster.server_arguments())
            self._environments = await there.stack.enter_async_context(serving)
        yield self._environments

    async def keep_after(self, died: RoleDiedError) -> None:
        """End what cannot survive a death: everything if a machine is gone, or if it is unknown which role died."""
        ranks = {role.name for role in place_roles(self._settings).roles if role.does == "rank"}
        if died.role not in ranks or died.with_its_node:
            await self.close()

    async def close(self) -> None:
        """End all roles, then the cluster."""
        opened, self._opened, self._environments = self._opened, None, None
        if opened is not None:
            await run_shielded(opened.stack.aclose())

    def _served(self, environments: Sequence[str], words: Sequence[str]) -> AbstractAsyncContextManager[str]:
        return embedded_server(
            environments,
            words=words,
            restarts=ServerRestarts(self.restarts.wait_s, self._shutdown.end, self._say),
        )

    def _say(self, text: str) -> None:
        self._shutdown.say(text)
