"""The connection to a Ray cluster, with room for the roles of a run, and their processes in its actors.

A process that ends is described by Ray's messages about it.
"""

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollgym.clients.process.ray_handlers import gist, own_breakpoints, take_back_signals
from rollgym.trainer.backends.local_ranks import last_words
from rollgym.trainer.backends.transport import pack
from rollgym.trainer.cluster.placement import Placement
from rollgym.trainer.cluster.role_host import RoleHost
from rollgym.trainer.cluster.supervision import Disconnection, part
from rollgym.trainer.core.errors import ConfigError, RoleDiedError, RunError

_LOOK_AT_NODE_EVERY_S = 2.0
_GONE_TIMEOUT_S = 15.0
_NODE_DIED = re.compile(
    r"node has died|node died|node was (?:terminated|removed)|node .{0,80} (?:is|was) dead"
)
_CUT_OFF = "End of file"
"""Ray's message for a process that was killed from outside: its connection ended."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of the cluster: what Ray calls it, and its address."""

    name: str
    address: str


def nodes() -> list[RayNode]:
    """Return the cluster's machines that are alive."""
    return [
        RayNode(str(node["NodeID"]), str(node["NodeManagerAddress"])) for node in ray.nodes() if node["Alive"]
    ]


class RayProcess:
    """A process of a role, in a Ray actor.

    Args:
        role: The role's name.
        number: The process's number in it.
        handle: The actor.
        log: File of its output, if it can write one.
        machine: Its node.
    """

    def __init__(self, role: str, number: int, handle: Any, log: Path, machine: RayNode) -> None:
        self.role = role
        self.number = number
        self.pid = 0
        self._handle = handle
        self._log = log
        self.node = machine.address
        self._machine = machine
        self._numbers = itertools.count()
        self._order = threading.Lock()
        self._gone = threading.Event()
        self._ended = False

    def make(self, maker: str, arguments: tuple[Any, ...], timeout_s: float) -> None:
        """Make its server, and wait for that.

        Raises:
            RunError: If it takes longer than `timeout_s`, or cannot be made.
            RoleDiedError: If the process ends before.
        """
        try:
            self.pid = self._answer(self._handle.process_id.remote(), timeout_s)
            self._answer(self._handle.make.remote(maker, pack(arguments)), timeout_s)
        except GetTimeoutError as error:
            self.end()
            raise RunError(
                f"process {self.number} of {self.role} was not ready within {timeout_s:g} s "
                f"(cluster.start_timeout_s); what it says: {self._log}"
            ) from error
        except RayTaskError as error:
            self.end()
            cause = error.as_instanceof_cause()
            raise RunError(f"process {self.number} of {self.role} cannot start: {gist(cause)}") from error
        except RayError as error:
            self.end()
            raise self._death(error) from error
        self._handle.live.remote().future().add_done_callback(lambda _: self._gone.set())

    def _answer(self, asked: Any, timeout_s: float) -> Any:
        """Wait for an answer; for an actor whose node has failed, Ray would wait until a similar node joins.

        Raises:
            GetTimeoutError: If it takes longer than `timeout_s`.
            RayError: If it fails.
            RoleDiedError: If the node has failed.
        """
        deadline = time.monotonic() + timeout_s
        while not ray.wait([asked], timeout=_LOOK_AT_NODE_EVERY_S)[0] and time.monotonic() < deadline:
            if not self._node_lives():
                self.end()
                raise self._death(RunError("its node has died"))
        return ray.get(asked, timeout=0.0)

    def _node_lives(self) -> bool:
        return any(node.name == self._machine.name for node in nodes())

    def call(self, data: bytes) -> "Future[bytes]":
        """Send a call to the actor; see `RoleProcess.call`."""
        answer: Future[bytes] = Future()

        def done(called: "Future[bytes]") -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller no longer waits
            error = called.exception()
            if error is None:
                answer.set_result(called.result())
            elif isinstance(error, RayError):
                _aside(lambda: answer.set_exception(self._death(error)))
            else:
                answer.set_exception(error)

        with self._order:
            asked = self._handle.call.remote(next(self._numbers), data)
        asked.future().add_done_callback(done)
        return answer

    def sees(self, path: str) -> bool:
        """Whether a file exists at a path on the process's machine.

        Raises:
            RoleDiedError: If the process has died.
        """
        try:
            return bool(ray.get(self._handle.sees.remote(path)))
        except RayError as error:
            raise self._death(error) from error

    def on_death(self, tell: Callable[[RoleDiedError], None]) -> None:
        """Register a callback for an unrequested end of the process."""

        def done(lived: "Future[None]") -> None:
            error = lived.exception()
            if error is not None and not self._ended:
                _aside(lambda: tell(self._death(error)))

        self._handle.live.remote().future().add_done_callback(done)

    def end(self) -> None:
        """Kill the process, and return when it has exited. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(RayError, ConnectionError):
            ray.kill(self._handle, no_restart=True)
        if self.pid:
            self._gone.wait(_GONE_TIMEOUT_S)

    def _death(self, error: BaseException) -> RoleDiedError:
        said = last_words(self._log)
        words = f"; it said last:\n{said}" if said else ""
        with_its_node = _NODE_DIED.search(str(error)) is not None or not self._node_lives()
        return RoleDiedError(
            self.role,
            f"process {self.number} of {self.role} on node {self.node} is gone: {gist(error)} (log {self._log})"
            f"{words}",
            node=self.node,
            killed=not with_its_node and (isinstance(error, OutOfMemoryError) or _CUT_OFF in str(error)),
            with_its_node=with_its_node,
        )


def _aside(work: Callable[[], None]) -> None:
    """Do what asks Ray something in a thread of its own: Ray's, which hands answers over, would wait for itself."""
    threading.Thread(target=work, name="ray-death", daemon=True).start()


_LOCAL = "local"
_LOCAL_OBJECT_STORE_BYTES = 512 * 1024 * 1024
_TRY_TIMEOUT_S = 10.0
_HEAD_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.5
_LEAVE_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_CALLS_AT_ONCE = 100_000
_NODES_SHOWN = 8
# Ray would decide itself which devices an actor sees, which it knows nothing of: they belong to the whole group.
_DEVICES_ARE_OURS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class RayCluster:
    """A connection to a cluster, with room for the roles of one run.

    Args:
        address: `auto` or `HOST:PORT`; without one, a cluster of this machine's own is started.
        cpus: CPUs that a cluster that is started here has at least; they are a count and bind nothing.
        working_dir: A directory with modules to import, which is sent to every node.
        logs: Folder of what the roles say, a file for each process.
    """

    def __init__(self, address: str | None, cpus: float, working_dir: str | None, logs: Path) -> None:
        self._address = address or _LOCAL
        self._cpus = cpus
        self._working_dir = working_dir
        self._logs = logs.absolute()
        self._group: PlacementGroup | None = None
        self._nodes: dict[int, RayNode] = {}
        self._own = RayNode("", "127.0.0.1")
        self._reached_at = ""
        self._devices: dict[int, list[str]] = {}
        self._placement: Placement | None = None
        self._timeout_s = 0.0

    def connect(self) -> None:
        """Connect. Ray stops a cluster that it started when the calling thread ends.

        Raises:
            ConfigError: If the cluster is unreachable, or cannot be used.
        """
        try:
            _try(self._address)
            self._connect()
        except (RayError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.address: cannot connect to Ray at '{self._address}': {gist(error)}; `ray status` shows "
                "whether a cluster runs (`ray start --head` starts one), one that asks for a token is reached with "
                "RAY_AUTH_MODE=token, and without cluster.address the run starts its own"
            ) from error

    def _connect(self) -> None:
        # Ray would tell its makers about this machine.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {}
        if self._address == _LOCAL:
            options |= {
                "include_dashboard": False,
                "object_store_memory": _LOCAL_OBJECT_STORE_BYTES,
                "num_cpus": max(os.cpu_count() or 1, int(self._cpus + 1)),
            }
        if self._working_dir is not None:
            options["runtime_env"] = {"working_dir": self._working_dir}
        with own_breakpoints():
            ray.init(self._address, configure_logging=False, log_to_driver=False, **options)
        self._reached_at = str(ray.get_runtime_context().gcs_address)
        own = ray.get_runtime_context().get_node_id()
        self._own = next(node for node in nodes() if node.name == own)

    def take_back_signals(self) -> None:
        """Restore the handlers of signals that end a run in order; Ray's own print stacks."""
        take_back_signals()

    @property
    def address(self) -> str:
        """The cluster's address, under which others reach it from here."""
        return self._reached_at

    async def head_answers(self) -> bool:
        """Whether anything listens at the cluster's address."""
        host, _, port = self._reached_at.rpartition(":")
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def reserve(
        self,
        placement: Placement,
        *,
        accelerators: bool | None,
        timeout_s: float,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """Reserve devices by whole nodes, and find out which nodes they are on.

        Args:
            placement: The placement of the roles.
            accelerators: Whether devices are accelerators, and not CPUs; None if the cluster decides.
            timeout_s: How long to wait for the devices.
            stop: Cancels the waiting.
            say: Receives messages for people about missing nodes; more may join.

        Raises:
            ConfigError: If the cluster does not have them free in time.
        """
        self._timeout_s = timeout_s
        each = placement.devices_per_node
        if accelerators is None:
            accelerators = float(ray.cluster_resources().get("GPU", 0)) >= each
        bundle = {"CPU": float(each)} | ({"GPU": float(each)} if accelerators else {})
        used = placement.used_nodes()
        if (fit := _large_enough(bundle)) < len(used):
            say(
                f"the roles need {_wanted(bundle, len(used))}, and the cluster has {fit} so large ({_listed(bundle)}): "
                f"others are waited for, up to {timeout_s:g} s (cluster.start_timeout_s)"
            )
        strategy = "STRICT_SPREAD" if len(used) > 1 else "PACK"
        group = self._group = placement_group([bundle] * len(used), strategy=strategy)
        deadline = time.monotonic() + timeout_s
        while not group.wait(_LOOK_EVERY_S):
            if stop.is_set():
                raise RunError("the run ends before its devices are free")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"cluster: {_wanted(bundle, len(used))} {'were' if len(used) > 1 else 'was'} not to be had within "
                    f"{timeout_s:g} s (cluster.start_timeout_s); the cluster has {_listed(bundle)}: name fewer "
                    "devices, wait for others to end, or add nodes"
                )
        self._placement = placement
        ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
        known = {node.name: node for node in nodes()}
        self._nodes = {node: known[ids[number]] for number, node in enumerate(used)}
        for number, node in enumerate(used):
            found = self._looked(number, each) if accelerators else []
            self._devices[node] = found

    def _looked(self, bundle: int, devices: int) -> list[str]:
        """The accelerators of a bundle, by the names that its node has for them."""
        look = ray.remote(_accelerators).options(
            num_cpus=0, num_gpus=devices, scheduling_strategy=self._in_bundle(bundle)
        )
        return [str(each) for each in ray.get(look.remote())]

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def start(
        self,
        role: str,
        number: int,
        devices: tuple[int, ...],
        maker: str,
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
    ) -> RayProcess:
        """Start a process of a role on the node of its devices, and return it when its server is ready.

        Args:
            role: The role's name.
            number: The process's number in it.
            devices: Its devices.
            maker: The factory of its server, as `module:attr`.
            arguments: Arguments of the factory.
            environment: Variables of the process.

        Raises:
            RoleDiedError: If it ends before.
        """
        assert self._placement is not None
        node = self._placement.node_of(devices[0])
        variables = dict(environment) | _DEVICES_ARE_OURS
        if named := self._devices[node]:
            seen = [named[self._placement.index_on_node(device)] for device in devices]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
        log = self._logs / f"{role}_{number}.log"
        handle = (
            ray.remote(RoleHost)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy=self._in_bundle(self._placement.used_nodes().index(node)),
            )
            .remote(
                variables, [path or os.getcwd() for path in sys.path], str(log), self._nodes[node].address
            )
        )
        process = RayProcess(role, number, handle, log, self._nodes[node])
        process.make(maker, arguments, self._timeout_s)
        return process

    def address_of(self, role: str, device: int) -> str:
        """Return the address at which the driver or the role's other processes reach a process of a role.

        Args:
            role: The role.
            device: A device of the process.
        """
        assert self._placement is not None
        named = self._placement.role(role)
        assert named is not None
        nodes = {self._nodes[self._placement.node_of(each)].name for each in named.devices}
        # Ranks talk only to each other, over the loopback if they share a node.
        asks = nodes if named.does == "rank" else nodes | {self._own.name}
        return "127.0.0.1" if len(asks) == 1 else self._nodes[self._placement.node_of(device)].address

    @property
    def here(self) -> str:
        """The address of this process's machine, as the nodes of the roles reach it."""
        others = {node.name for node in self._nodes.values()} - {self._own.name}
        return self._own.address if others else "127.0.0.1"

    def is_beside(self, device: int) -> bool:
        """Whether a device is on the machine of this process."""
        assert self._placement is not None
        return self._nodes[self._placement.node_of(device)].name == self._own.name

    def disconnect(self) -> Disconnection:
        """Give the devices back and leave the cluster; what was started here is ended.

        Ray itself retries a dead head for ever.
        """
        if self._head_listens() and part(self._leave, _LEAVE_TIMEOUT_S) is Disconnection.IN_ORDER:
            return Disconnection.IN_ORDER
        # At this process's end Ray would ask once more, and crash if its threads still ran.
        atexit.unregister(ray.shutdown)
        if (worker := getattr(ray._private.worker.global_worker, "core_worker", None)) is not None:
            part(worker.shutdown_driver, _END_TIMEOUT_S)
        return Disconnection.UNANSWERED

    def _head_listens(self) -> bool:
        try:
            _try(self._reached_at, _HEAD_TIMEOUT_S)
        except OSError:
            return False
        return True

    def _leave(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RayError, ConnectionError):
                remove_placement_group(self._group)
            self._group = None
        ray.shutdown()


def _accelerators() -> list[str]:
    """Return Ray's name for the accelerators of the calling task."""
    return [str(each) for each in ray.get_gpu_ids()]


def _wanted(bundle: Mapping[str, float], nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''} with {_amounts(bundle, bundle)} each"


def _large_enough(bundle: Mapping[str, float]) -> int:
    """How many nodes of the cluster could hold a bundle, if they were entirely free."""
    return sum(
        all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    )


def _listed(bundle: Mapping[str, float]) -> str:
    """Describe the nodes' resources that a bundle needs, and how much of them is free."""
    living = [node for node in ray.nodes() if node["Alive"]]
    shown = [
        f"{_amounts(bundle, node['Resources'])} on {node['NodeManagerAddress']}"
        for node in living[:_NODES_SHOWN]
    ]
    if len(living) > _NODES_SHOWN:
        shown.append(f"{len(living) - _NODES_SHOWN} nodes more")
    return f"{'; '.join(shown)}; {_amounts(bundle, ray.available_resources())} free in all"


def _amounts(names: Iterable[str], resources: Mapping[str, Any]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _try(address: str, timeout_s: float = _TRY_TIMEOUT_S) -> None:
    """See whether anything is at an address; Ray would try for very long, and cannot be interrupted."""
    host, separator, port = address.rpartition("/")[2].rpartition(":")
    if separator:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            pass
