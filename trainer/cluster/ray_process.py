"""A process of a role in an actor of a Ray cluster, and Ray's messages about those that end."""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from rollgym.clients.process.ray_handlers import gist
from rollgym.trainer.backends.local_ranks import last_words
from rollgym.trainer.backends.transport import pack
from rollgym.trainer.core.errors import RoleDiedError, RunError

_LOOK_AT_NODE_EVERY_S = 2.0
_GONE_TIMEOUT_S = 15.0
_NODE_DIED = re.compile(
    r"node has died|node died|node was (?:terminated|removed)|node .{0,80} (?:is|was) dead"
)
_CUT_OFF = "End of file"
"""Ray's message for a process that was killed from outside: its connection ended."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster: what Ray calls it, and its address."""

    name: str
    address: str


def nodes() -> list[Node]:
    """Return the cluster's machines that are alive."""
    return [
        Node(str(node["NodeID"]), str(node["NodeManagerAddress"])) for node in ray.nodes() if node["Alive"]
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

    def __init__(self, role: str, number: int, handle: Any, log: Path, machine: Node) -> None:
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
