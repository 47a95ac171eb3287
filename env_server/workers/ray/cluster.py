"""The connection to a Ray cluster: the only module that imports Ray."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rollgym.clients.process.ray_handlers import gist, own_breakpoints, take_back_signals
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.workers.base import WorkerLost
from rollgym.env_server.workers.ray.host import ActorHost

_LOCAL = "local"
# Answers that are too large for a message pass through it: pictures of many environments at once.
_LOCAL_OBJECT_STORE_BYTES = 256 * 1024 * 1024
_TRY_TIMEOUT_S = 10.0
# Calls that wait at an actor, and room for those that do not.
_CALLS_PER_ACTOR = 16


class WorkerCluster:
    """Connects to a cluster, or starts one on this machine, and starts actors there.

    Args:
        address: `auto`, `host:port` or `ray://host:port`; without one, a cluster of this machine's own is started.
        working_dir: A directory that is sent to every node, where environments are imported from.
    """

    def __init__(self, address: str | None, working_dir: Path | None) -> None:
        self._address = address or _LOCAL
        self._working_dir = working_dir
        # Ray ends a cluster that it has started when the thread does that it was started from.
        self._thread = ThreadPoolExecutor(1, "ray")
        self._host: Any = None

    async def connect(self) -> None:
        """Connect to the Ray cluster.

        Raises:
            ConfigurationError: The cluster does not exist, or it cannot be used.
        """
        try:
            await _try(self._address)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connect)
        except (RayError, OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigurationError(
                f"cannot connect to Ray at {self._address!r}: {gist(error)}; `ray status` shows whether "
                "a cluster runs (`ray start --head` starts one), one that asks for a token is reached with "
                "RAY_AUTH_MODE=token, and without ray_address the server starts its own"
            ) from error
        take_back_signals()
        self._host = ray.remote(ActorHost)

    def _connect(self) -> None:
        # Ray would otherwise send usage data of this machine to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Output of environments is prefixed with its origin, without colours: the log is not a terminal.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        # It warns of intended settings: that it handles no signals here, and that its ports require a token.
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {}
        if self._address == _LOCAL:
            options |= {"include_dashboard": False, "object_store_memory": _LOCAL_OBJECT_STORE_BYTES}
        if self._working_dir is not None:
            options["runtime_env"] = {"working_dir": os.fspath(self._working_dir)}
        with own_breakpoints():
            ray.init(self._address, configure_logging=False, **options)

    def look_at_node(self) -> "asyncio.Future[bool]":
        """Check whether the node that this process is connected through is alive; Ray may never answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def look() -> None:
            try:
                own = ray.get_runtime_context().get_node_id()
                there = any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
            except (RayError, OSError, RuntimeError):
                there = False
            # The loop may be closed by now: then no task is left to notify.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answer.set_result, there)

        # A thread that hangs must not keep the server from ending.
        threading.Thread(target=look, name="ray-node", daemon=True).start()
        return answer

    def start_host(self, num_cpus: float, processes: int) -> Any:
        """Create an actor; return its handle at once, before it has started."""
        return self._host.options(
            num_cpus=num_cpus, max_restarts=0, max_task_retries=0, max_concurrency=_CALLS_PER_ACTOR
        ).remote(processes, list(sys.path))

    def call(self, handle: Any, method: str, *arguments: Any) -> "asyncio.Future[Any]":
        """Call an actor; the future raises `WorkerLost` when the actor has ended."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def done(called: Any) -> None:
            # The loop may be closed by now: then no task is left to notify.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, called)

        getattr(handle, method).remote(*arguments).future().add_done_callback(done)
        return answer

    def kill(self, handle: Any) -> None:
        """End an actor at once, or one that has not started."""
        # It may be gone already, and the connection with it.
        with contextlib.suppress(RayError, ConnectionError):
            ray.kill(handle, no_restart=True)

    async def disconnect(self) -> None:
        """Disconnect from the cluster, which ends this process's remaining actors; stop a cluster started here."""
        await asyncio.get_running_loop().run_in_executor(self._thread, ray.shutdown)
        self._thread.shutdown()


async def _try(address: str) -> None:
    """See whether anything is at an address; Ray would try for very long, and cannot be interrupted."""
    host, separator, port = address.rpartition("/")[2].rpartition(":")
    if separator:
        async with asyncio.timeout(_TRY_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()


def _settle(answer: "asyncio.Future[Any]", called: Any) -> None:
    if answer.done():
        return
    error = called.exception()
    if error is None:
        answer.set_result(called.result())
    elif isinstance(error, RayError | ConnectionError):
        answer.set_exception(WorkerLost(gist(error)))
    else:
        answer.set_exception(error)
