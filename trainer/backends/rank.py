"""A rank: a process that holds its part of sharded models, and answers calls one after another.

`python -m rollgym.trainer.backends.rank PIPE PARENT` is how `LocalRanks` starts one.
"""

import gc
import os
import select
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from rollgym.trainer.backends.rank_group import MeshShape, RankGroup, listen
from rollgym.trainer.backends.transport import (
    CallFailure,
    MakeBackend,
    RankFailedError,
    RankWaitedError,
    pack,
    unpack,
)
from rollgym.trainer.core.errors import TrainerError

_FIXED = ("has_adapter", "shares", "why_not_shared", "kernels")
"""Attributes of a backend that never change: each is sent once."""


class RankServer:
    """Answers calls in one rank. Every public method can be called by name.

    Args:
        rank: This rank's number.
        world_size: How many there are.
        local_rank: Its number among those of its machine, which is that of its accelerator.
    """

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._local_rank = local_rank
        self._store: Any = None
        self._group: RankGroup | None = None
        self._backends: dict[str, Any] = {}
        self._streams: dict[int, Iterator[tuple[str, Any]]] = {}

    def ready(self) -> None:
        """Answer that calls are taken."""

    def listen(self, host: str = "127.0.0.1") -> str:
        """Open the place where all ranks meet, on a free port, and return its address; the first rank does."""
        self._store, address = listen(host, self._world_size)
        return address

    def join(self, address: str, mesh: MeshShape, device: str, timeout_s: float) -> None:
        """Meet the other ranks.

        Args:
            address: What the first rank's `listen` returned.
            mesh: How ranks share the work.
            device: Type of device to compute on; `auto` is the accelerator that torch finds, else the processor.
            timeout_s: How long a rank waits for the others in one exchange.
        """
        self._group = RankGroup(self._rank, self._local_rank, mesh, device, address, self._store, timeout_s)

    def build(self, name: str, make: MakeBackend) -> dict[str, Any]:
        """Make a backend and keep it under a name; return what of it does not change.

        Args:
            name: Its name.
            make: The recipe; it is given the group, and the backends that were made before by name.
        """
        assert self._group is not None
        backend = make(self._group, self._backends)
        self._group.bound_waits()
        self._backends[name] = backend
        return {name: getattr(backend, name, None) for name in _FIXED}

    def drop(self, name: str) -> None:
        """Forget a backend, and give its memory back."""
        del self._backends[name]
        gc.collect()

    def forget(self) -> None:
        """Forget all backends, whatever they were at, and give their memory back."""
        self._streams.clear()
        self._backends.clear()
        gc.collect()

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of a backend."""
        return getattr(self._backends[name], method)(*arguments)

    def open_stream(self, number: int, name: str, method: str) -> None:
        """Begin to read what a backend yields by names; all ranks read, because all hold a part of it."""
        self._streams[number] = getattr(self._backends[name], method)()

    def read_stream(self, number: int, limit: int) -> list[tuple[str, Any]] | None:
        """Return the next of it, about `limit` bytes; nothing at its end. All but the first rank return none of it."""
        parts: list[tuple[str, Any]] = []
        size = 0
        for name, content in self._streams[number]:
            size += content.numel() * content.element_size() if isinstance(content, Tensor) else 0
            if self._rank == 0:
                parts.append((name, content.cpu() if isinstance(content, Tensor) else content))
            else:
                parts.append((name, None))
            if size >= limit:
                break
        return parts or None

    def close_stream(self, number: int) -> None:
        """Read no more of it."""
        self._streams.pop(number, None)


class NodeRankServer(RankServer):
    """Answers calls in a process of a cluster; ranks of other machines meet it at its node's address.

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


def answer(server: RankServer, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Have a server answer a call: whether it did not fail, and what it returned or the failure."""
    try:
        return True, getattr(server, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - the boundary to another process
        traceback.print_exc()
        sys.stderr.flush()
        return False, _failure(error, server)


def _failure(error: Exception, server: RankServer) -> CallFailure:
    if isinstance(error, TrainerError | ValueError) and _can_be_sent(error):
        return CallFailure(error, of_the_group=False)
    message = f"rank {server._rank} of {server._world_size} failed: {type(error).__name__}: {error}"
    # Torch has no type of its own for it that gloo knows of.
    waited = isinstance(error, RuntimeError) and "timed out" in str(error).lower()
    kind = RankWaitedError if waited else RankFailedError
    return CallFailure(kind(message), of_the_group=True)


def _can_be_sent(error: Exception) -> bool:
    try:
        unpack(pack(error))
    except Exception:  # noqa: BLE001 - pickling runs the error class's own code, which may raise anything
        return False
    return True


def main() -> None:
    """Answer calls that come through a pipe, until its other end closes."""
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_watch, args=(pipe, parent, calls), daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = RankServer(rank, world_size, int(os.environ["LOCAL_RANK"]))
    while True:
        method, arguments = unpack(calls.get())
        pipe.send_bytes(pack(answer(server, method, arguments)))


def _watch(pipe: Connection, parent: int, calls: "SimpleQueue[bytes]") -> None:
    """Take calls in; end this process at once when the pipe closes or its parent is gone, whatever it is doing."""
    watched: list[Any] = [pipe]
    if hasattr(os, "pidfd_open"):
        # Another child of the parent may still hold the other end of the pipe.
        try:
            watched.append(os.pidfd_open(parent))
        except OSError:
            os._exit(1)
    while True:
        ready, _, _ = select.select(watched, [], [])
        if pipe not in ready:
            os._exit(1)
        try:
            calls.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


if __name__ == "__main__":
    main()
