"""The server of a rank that is a process of a cluster: all that such a process loads, which needs no Ray of its own."""

from rollgym.trainer.backends.rank import RankServer


class NodeRankServer(RankServer):
    """Answers a rank's calls; ranks of other machines meet it at its node's address.

    Args:
        rank: This rank's number.
        world_size: The number of ranks.
        address: Address of its node, as the other ranks reach it.
    """

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        # The process sees one device, its own.
        super().__init__(rank, world_size, local_rank=0)
        self._address = address

    def listen(self, host: str | None = None) -> str:
        """Open the place where all ranks meet, on a free port, and return its address."""
        return super().listen(host or self._address)
