"""One Ray cluster for all tests of this folder that need one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="session")
def ray_cluster() -> "Iterator[Cluster]":
    """A head, where drivers are, and two nodes for the roles; each has an address of its own on the loopback."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        running = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        running.add_node(num_cpus=4, node_ip_address="127.0.0.2")
        running.add_node(num_cpus=4, node_ip_address="127.0.0.3")
        yield running
        running.shutdown()
