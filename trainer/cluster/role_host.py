"""The code of an actor: a process of one role, which holds a server and answers calls of its methods.

Nothing of torch is imported before the process knows which devices it may see.
"""

import asyncio
import fcntl
import importlib
import inspect
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_SEEN_LATE_S = 10.0
_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""


class RoleHost:
    """Holds a server and answers calls.

    Methods that compute run one after another, in the order of their numbers, in a thread of their own: an actor may
    be handed its calls in any order. Coroutines run concurrently, and begin in order of arrival.

    Args:
        environment: Variables of this process.
        path: The driver's import path; entries that exist here, and are not on the path yet, are appended.
        log: File for this process's output, if it is writable.
        address: The address of this node, as others reach it.
    """

    def __init__(
        self, environment: Mapping[str, str], path: Sequence[str], log: str, address: str = "127.0.0.1"
    ) -> None:
        os.environ.update(environment)
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_of(address)):
            # Otherwise gloo resolves the host's own name, which need not be the address that others reach.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        sys.path.extend(each for each in path if each not in sys.path and os.path.exists(each))
        _say_to(Path(log))
        sys.stdout.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        sys.stdout.flush()
        self._thread = ThreadPoolExecutor(1, "role")
        self._server: Any = None
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def process_id(self) -> int:
        """Return this process's number on its machine."""
        return os.getpid()

    async def make(self, maker: str, arguments: bytes) -> None:
        """Make the server.

        Args:
            maker: The server's factory, as `module:attr`.
            arguments: The factory's arguments, pickled.
        """
        self._server = await asyncio.get_running_loop().run_in_executor(self._thread, _made, maker, arguments)

    async def call(self, number: int, data: bytes) -> bytes:
        """Call a method of the server and return, packed, whether it did not fail and what it came to.

        Args:
            number: The call's place in the order of all calls to this process.
            data: The method's name and its arguments, packed.
        """
        from rollgym.trainer.backends.transport import pack, unpack

        await self._turn(number)
        try:
            method, arguments = unpack(data)
            function = getattr(self._server, method)
            if not inspect.iscoroutinefunction(function):
                work = asyncio.get_running_loop().run_in_executor(
                    self._thread, _answered, self._server, method, arguments
                )
        finally:
            self._give_turn(number)
        if not inspect.iscoroutinefunction(function):
            return await work
        try:
            return pack((True, await function(*arguments)))
        except Exception as error:  # noqa: BLE001 - the boundary to another process
            traceback.print_exc()
            return pack((False, _sendable(error)))

    async def sees(self, path: str) -> bool:
        """Return whether this machine sees a file at a path; a shared disk may show a new one late."""
        return await asyncio.to_thread(_seen, path)

    async def live(self) -> None:
        """Never return: a waiting caller thereby notices the end of this process."""
        await asyncio.Event().wait()

    async def _turn(self, number: int) -> None:
        if number != self._next:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            await self._waiting[number]

    def _give_turn(self, number: int) -> None:
        self._next = number + 1
        if (waiting := self._waiting.pop(self._next, None)) is not None:
            waiting.set_result(None)


def _made(maker: str, arguments: bytes) -> Any:
    from rollgym.trainer.backends.transport import unpack

    module, _, name = maker.partition(":")
    return getattr(importlib.import_module(module), name)(*unpack(arguments))


def _answered(server: Any, method: str, arguments: Sequence[Any]) -> bytes:
    from rollgym.trainer.backends.rank import answer
    from rollgym.trainer.backends.transport import pack

    return pack(answer(server, method, arguments))


def _sendable(error: Exception) -> Exception:
    """An error that the driver can read, too."""
    from rollgym.trainer.core.errors import RunError, TrainerError

    if isinstance(error, TrainerError | ValueError):
        return error
    return RunError(f"{type(error).__name__}: {error}")


def _interface_of(address: str) -> str | None:
    """The network interface that has an address; None if it cannot be determined."""
    if address.startswith("127."):
        return "lo" if sys.platform == "linux" else None
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _seen(path: str) -> bool:
    until = time.monotonic() + _SEEN_LATE_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def _say_to(log: Path) -> None:
    """Write what this process says to a file; on a machine without the run's directory Ray's own log has it."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
