"""The connection to a Ray cluster: the only module of the trainer that imports Ray."""

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from clients.own_handlers import own_breakpoints, take_back_signals
from trainer.backends.local_ranks import last_words
from trainer.backends.transport import pack
from trainer.cluster.placement import Placement
from trainer.cluster.role_host import RoleHost
from trainer.core.errors import ConfigError, RoleDiedError, RunError

_LOCAL = "local"
_LOCAL_OBJECT_STORE_BYTES = 512 * 1024 * 1024
_TRY_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.5
_GONE_TIMEOUT_S = 15.0
_CALLS_AT_ONCE = 100_000
_LONGEST_REASON = 300
# Ray would decide itself which devices an actor sees, which it knows nothing of: they belong to the whole group.
_DEVICES_ARE_OURS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class RayCluster:
    """A connection to a cluster, with room for the roles of one run.

    Args:
        address: `auto` or `HOST:PORT`; without one, a cluster of this machine's own is started.
        cpus: CPUs that a cluster that is started here has at least; they are a count and bind nothing.
        working_dir: A directory that is sent to every node, where modules are imported from.
        logs: Folder of what the roles say, a file for each process.
    """

    def __init__(self, address: str | None, cpus: float, working_dir: str | None, logs: Path) -> None:
        self._address = address or _LOCAL
        self._cpus = cpus
        self._working_dir = working_dir
        self._logs = logs.absolute()
        self._group: PlacementGroup | None = None
        self._nodes: dict[int, str] = {}
        self._devices: dict[int, list[str]] = {}
        self._placement: Placement | None = None
        self._timeout_s = 0.0

    def connect(self) -> None:
        """Connect. Ray ends a cluster that it has started when the thread ends that this is called in.

        Raises:
            ConfigError: If there is no such cluster, or it cannot be used.
        """
        try:
            _try(self._address)
            self._connect()
        except (RayError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.address: cannot connect to Ray at '{self._address}': {_gist(error)}; `ray status` shows "
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

    def take_back_signals(self) -> None:
        """Take signals that end a run in good order back from Ray, which writes stacks at them."""
        take_back_signals()

    @property
    def address(self) -> str:
        """The cluster's address, under which others reach it from here."""
        return str(ray.get_runtime_context().gcs_address)

    def reserve(
        self, placement: Placement, *, accelerators: bool | None, timeout_s: float, stop: threading.Event
    ) -> None:
        """Reserve whole nodes' worth of devices, and find out which they are.

        Args:
            placement: Where the roles are.
            accelerators: Whether devices are accelerators, and not CPUs; None where it is for the cluster to say.
            timeout_s: How long to wait for them.
            stop: Ends the waiting.

        Raises:
            ConfigError: If the cluster does not have them, or not free, in time.
        """
        self._timeout_s = timeout_s
        each = placement.devices_per_node
        if accelerators is None:
            accelerators = float(ray.cluster_resources().get("GPU", 0)) >= each
        bundle = {"CPU": float(each)} | ({"GPU": float(each)} if accelerators else {})
        used = placement.used_nodes()
        strategy = "STRICT_SPREAD" if len(used) > 1 else "PACK"
        group = self._group = placement_group([bundle] * len(used), strategy=strategy)
        deadline = time.monotonic() + timeout_s
        while not group.wait(_LOOK_EVERY_S):
            if stop.is_set():
                raise RunError("the run ends before its devices are free")
            if time.monotonic() > deadline:
                raise ConfigError(_missing(bundle, len(used), timeout_s))
        self._placement = placement
        ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
        self._nodes = {node: ids[number] for number, node in enumerate(used)}
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
    ) -> "RayProcess":
        """Start a process of a role where its devices are, and return it when its server is made.

        Args:
            role: The role's name.
            number: The process's number in it.
            devices: Its devices.
            maker: What makes its server, as `module:attr`.
            arguments: What the server is made with.
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
            .remote(variables, list(sys.path), str(log))
        )
        process = RayProcess(role, number, handle, log)
        process.make(maker, arguments, self._timeout_s)
        return process

    def address_of(self, device: int) -> str:
        """The address of the node that a device is on, as the other nodes reach it."""
        assert self._placement is not None
        node = self._placement.node_of(device)
        if len(self._nodes) == 1:
            return "127.0.0.1"
        found = next(each for each in ray.nodes() if each["NodeID"] == self._nodes[node])
        return str(found["NodeManagerAddress"])

    def disconnect(self) -> None:
        """Give the devices back and leave the cluster; what was started here is ended."""
        if self._group is not None:
            with contextlib.suppress(RayError, ConnectionError):
                remove_placement_group(self._group)
            self._group = None
        ray.shutdown()


class RayProcess:
    """A process of a role, in an actor.

    Args:
        role: The role's name.
        number: The process's number in it.
        handle: The actor.
        log: Where it writes what it says, if it can.
    """

    def __init__(self, role: str, number: int, handle: Any, log: Path) -> None:
        self.role = role
        self.number = number
        self.pid = 0
        self._handle = handle
        self._log = log
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
            self.pid = ray.get(self._handle.process_id.remote(), timeout=timeout_s)
            ray.get(self._handle.make.remote(maker, pack(arguments)), timeout=timeout_s)
        except GetTimeoutError as error:
            self.end()
            raise RunError(
                f"process {self.number} of {self.role} was not ready within {timeout_s:g} s "
                f"(cluster.start_timeout_s); what it says: {self._log}"
            ) from error
        except RayTaskError as error:
            self.end()
            cause = error.as_instanceof_cause()
            raise RunError(f"process {self.number} of {self.role} cannot start: {_gist(cause)}") from error
        except RayError as error:
            self.end()
            raise self._death(error) from error
        self._handle.live.remote().future().add_done_callback(lambda _: self._gone.set())

    def call(self, data: bytes) -> "Future[bytes]":
        """Have it answer a call; see `RoleProcess.call`."""
        answer: Future[bytes] = Future()

        def done(called: "Future[bytes]") -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            error = called.exception()
            if error is None:
                answer.set_result(called.result())
            else:
                answer.set_exception(self._death(error) if isinstance(error, RayError) else error)

        with self._order:
            asked = self._handle.call.remote(next(self._numbers), data)
        asked.future().add_done_callback(done)
        return answer

    def on_death(self, tell: Callable[[RoleDiedError], None]) -> None:
        """Have somebody told when the process ends without being asked to."""

        def done(lived: "Future[None]") -> None:
            error = lived.exception()
            if error is not None and not self._ended:
                tell(self._death(error))

        self._handle.live.remote().future().add_done_callback(done)

    def end(self) -> None:
        """End it at once, and return when it is gone. A second call does nothing."""
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
        return RoleDiedError(
            self.role,
            f"process {self.number} of {self.role} is gone: {_gist(error)} (log {self._log}){words}",
        )


def _accelerators() -> list[str]:
    """What Ray calls the accelerators of the task that asks."""
    return [str(each) for each in ray.get_gpu_ids()]


def _missing(bundle: Mapping[str, float], nodes: int, timeout_s: float) -> str:
    def listed(resources: Mapping[str, Any]) -> str:
        return ", ".join(f"{resources.get(name, 0):g} {name}" for name in bundle)

    return (
        f"cluster: {nodes} node{'s' if nodes > 1 else ''} with {listed(bundle)} each "
        f"{'were' if nodes > 1 else 'was'} not to be had within {timeout_s:g} s (cluster.start_timeout_s); the "
        f"cluster has {listed(ray.cluster_resources())} in all, of which {listed(ray.available_resources())} are "
        "free: name fewer devices, wait for others to end, or add nodes"
    )


def _try(address: str) -> None:
    """See whether anything is at an address; Ray would try for very long, and cannot be interrupted."""
    host, separator, port = address.rpartition("/")[2].rpartition(":")
    if separator:
        with socket.create_connection((host.strip("[]"), int(port)), _TRY_TIMEOUT_S):
            pass


def _gist(error: BaseException) -> str:
    """The first and the last line of what Ray says: between them are often stacks of other processes."""
    # What it supposes to be the reason is the same each time.
    text = str(error).partition("Some common causes include")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} ({lines[-1][:_LONGEST_REASON]})"
