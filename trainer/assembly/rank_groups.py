"""The ranks that a run's models are divided over: a group for each set of devices, that outlives a try at the run."""

import asyncio

from trainer.backends.rank_group import MeshShape
from trainer.backends.ranked import Ranks
from trainer.cluster.cluster import Cluster
from trainer.cluster.placement import Role
from trainer.config.run import RunSettings
from trainer.core.ending import to_its_end
from trainer.core.errors import TrainerError


class RankGroups:
    """Starts groups of ranks, and keeps those that live: where one dies, only its group is started again.

    Args:
        settings: The run.
        cluster: Where they are.
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
            await to_its_end(asyncio.to_thread(ranks.start))
            self._groups[role.devices] = ranks
        return ranks

    async def begin_anew(self) -> None:
        """Have the groups that live forget their models, and end those that do not."""
        for devices, ranks in list(self._groups.items()):
            try:
                self._groups[devices] = await to_its_end(asyncio.to_thread(ranks.begun_anew))
            except TrainerError:  # those of this group are gone, or do not know what the others wait for
                del self._groups[devices]
                await to_its_end(asyncio.to_thread(ranks.close))

    async def close(self) -> None:
        """End all ranks."""
        groups, self._groups = list(self._groups.values()), {}
        await to_its_end(_closed(groups))


async def _closed(groups: list[Ranks]) -> None:
    await asyncio.gather(*(asyncio.to_thread(ranks.close) for ranks in groups))


def mesh_shape(settings: RunSettings, ranks: int) -> MeshShape:
    """Return how so many ranks share the work of a model."""
    mesh = settings.backend.mesh
    return MeshShape(ranks // mesh.model_ranks, mesh.tensor, mesh.pipeline, mesh.context, mesh.expert)
