"""Ranks as child processes of this one, on this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rollgym.clients.process.modules import python_module
from rollgym.trainer.backends.transport import CallFailure, RankDiedError, RankFailedError, pack, unpack
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import write_errors

_LAST_LINES = 12
_LINE_WIDTH = 300
_GRACE_S = 5.0
_CAUSE_S = 2.0
"""How long the death that made another rank's call fail is waited for: it is a matter of the kernel's milliseconds."""


@dataclass
class _Rank:
    """One child: its process, the pipe to it, the calls on their way there and those that it has not answered."""

    number: int
    process: "subprocess.Popen[bytes]"
    pipe: Connection
    log: Path
    asked: "deque[Future[Any]]" = field(default_factory=deque)
    calls: "SimpleQueue[bytes | None]" = field(default_factory=SimpleQueue)


class LocalRanks:
    """Starts ranks as child processes, each with a pipe of its own.

    A rank that dies is noticed at once, because its end of the pipe closes; a rank notices the death of this process in
    the same way, whatever killed it, and ends.

    Args:
        logs: Folder of what the ranks say, a file each.
        threads: Threads of each rank's operators.
        devices: The accelerator of each rank, by its number on this machine; that of the rank if none are named.
        role: The role that the error names if one of them dies.
        start_timeout_s: How long one may take until it takes calls.
    """

    def __init__(
        self,
        logs: Path,
        threads: int = 1,
        devices: Sequence[int] = (),
        role: str = "actor_train",
        start_timeout_s: float = 600.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._role = role
        self._logs = logs
        self._devices = devices
        self._threads = threads
        self._ranks: list[_Rank] = []
        self._threads_of_ranks: list[threading.Thread] = []
        self._state = threading.Condition()
        self._death: RankDiedError | None = None
        self._closed = False
        self._closing = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [rank.process.pid for rank in self._ranks]

    def start(self, world_size: int) -> None:
        """Start so many ranks, and return once all of them take calls.

        Raises:
            RankDiedError: If one of them does not start.
            RunError: If one of them takes too long.
            WriteError: If the disk does not take what they say.
        """
        with write_errors(self._logs):
            self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(world_size):
                self._ranks.append(self._started(number, world_size))
            for rank in self._ranks:
                for does, name in ((self._read, "reader"), (_send, "sender")):
                    thread = threading.Thread(
                        target=does, args=(rank,), name=f"rank-{rank.number}-{name}", daemon=True
                    )
                    self._threads_of_ranks.append(thread)
                    thread.start()
            self._wait_until_ready([self.call(number, "ready") for number in range(world_size)])
        except BaseException:
            self.close()
            raise

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        """Have a rank's server call one of its methods; see `RankTransport.call`."""
        answer: Future[Any] = Future()
        data = pack((method, arguments))
        with self._state:
            if self._death is not None or self._closed:
                answer.set_exception(self._death or _closed())
                return answer
            chosen = self._ranks[rank]
            chosen.asked.append(answer)
            # By a thread: a rank that stands still takes no more than its pipe holds, and the others are to be asked.
            chosen.calls.put(data)
        return answer

    def close(self) -> None:
        """End all ranks, whatever they are doing, and return once they are gone. A second call does nothing."""
        with self._state:
            self._closed = True
        with self._closing:  # concurrent callers wait until the first has closed the ranks
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    rank.process.kill()
            for rank in self._ranks:
                rank.process.wait()
                rank.calls.put(None)
            for thread in self._threads_of_ranks:
                thread.join(_GRACE_S)
            for rank in self._ranks:
                rank.pipe.close()
            self._ranks, self._threads_of_ranks = [], []

    def _started(self, number: int, world_size: int) -> _Rank:
        log = self._logs / f"rank_{number}.log"
        with write_errors(log):
            said = log.open("ab")
        ours, theirs = socket.socketpair()
        with theirs, said:
            environment = _environment(number, world_size, self._threads, self._device_of(number))
            process = self._launched(theirs.fileno(), said.fileno(), environment)
        return _Rank(number, process, Connection(ours.detach()), log)

    def _launched(self, pipe: int, said: int, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start the process of a rank.

        Args:
            pipe: Descriptor of its end of the pipe.
            said: Descriptor of its log.
            environment: All of its variables.
        """
        return subprocess.Popen(
            python_module("rollgym.trainer.backends.rank", str(pipe), str(os.getpid())),
            pass_fds=[pipe],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            # An interruption from the keyboard is the driver's: it ends the ranks in order.
            start_new_session=True,
        )

    def _wait_until_ready(self, answers: "Sequence[Future[Any]]") -> None:
        _, silent = wait(answers, self._start_timeout_s, FIRST_EXCEPTION)
        for answer in answers:
            if answer.done():
                answer.result()
        if silent:
            late = next(rank for rank, answer in zip(self._ranks, answers, strict=True) if answer in silent)
            raise RunError(
                f"rank {late.number} of {len(answers)} was not ready within {self._start_timeout_s:g} s "
                f"(cluster.start_timeout_s); what it says: {late.log}"
            )

    def _device_of(self, number: int) -> int:
        return self._devices[number] if self._devices else number

    def _read(self, rank: _Rank) -> None:
        """Hand a rank's answers on, until its end of the pipe closes."""
        with suppress(EOFError, OSError):
            while True:
                self._answer(rank, *_read_answer(rank, rank.pipe.recv_bytes()))
        rank.process.wait()
        with self._state:
            if not self._closed and self._death is None:
                self._death = _death_of(rank, len(self._ranks), self._role)
            self._fail_all()
            self._state.notify_all()

    def _answer(self, rank: _Rank, done: bool, content: Any) -> None:
        """Give the oldest call of a rank its answer.

        Args:
            rank: Whose.
            done: Whether the call did not fail.
            content: What it returned, or what it raised.
        """
        if not done:
            # Where a rank dies, the others fail because they miss it: the death is the answer.
            with self._state:
                self._state.wait_for(self._someone_is_gone, _CAUSE_S if content.of_the_group else 0.0)
                if self._death is not None:
                    self._fail_all()
                    return
        with self._state:
            if not rank.asked:
                return
            answer = rank.asked.popleft()
        if done:
            answer.set_result(content)
        else:
            answer.set_exception(content.error)

    def _someone_is_gone(self) -> bool:
        return self._death is not None or self._closed

    def _fail_all(self) -> None:
        """Fail every call that waits; the lock is held."""
        error = self._death or _closed()
        for rank in self._ranks:
            while rank.asked:
                rank.asked.popleft().set_exception(error)


def _send(rank: _Rank) -> None:
    """Hand calls to a rank until the queue gives None."""
    # If the rank has died, its reader thread fails the pending calls: nothing to report here.
    with suppress(OSError):
        while (data := rank.calls.get()) is not None:
            rank.pipe.send_bytes(data)


def _closed() -> RankFailedError:
    return RankFailedError("the ranks are closed")


def _read_answer(rank: _Rank, data: bytes) -> tuple[bool, Any]:
    """Return whether a call did not fail, and what it returned or its failure."""
    try:
        done, content = unpack(data)
    except Exception as error:  # noqa: BLE001 - whatever a class of the answer raises when it is made again
        unread = f"the answer of rank {rank.number} cannot be read: {type(error).__name__}: {error}"
        return False, CallFailure(RankFailedError(unread), of_the_group=False)
    return done, content


def _environment(number: int, world_size: int, threads: int, device: int) -> dict[str, str]:
    """The variables of a rank: torch's usual ones, and modules found where this process finds them."""
    ours = {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(device),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
    }
    if sys.platform == "linux":
        # Otherwise gloo looks the host's own name up, which need not lead back to this machine.
        ours["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**os.environ, **ours}


def _death_of(rank: _Rank, world_size: int, role: str) -> RankDiedError:
    code = rank.process.returncode
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    said = last_words(rank.log)
    words = f"; it said last:\n{said}" if said else ""
    return RankDiedError(
        f"rank {rank.number} of {world_size} is gone ({how}, log {rank.log}){words}",
        rank.number,
        role,
        killed=code == -signal.SIGKILL,
    )


def last_words(log: Path) -> str:
    """Return the last lines of a log, cut to a readable length; an empty text if the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_LINES * _LINE_WIDTH * 4))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(line[:_LINE_WIDTH] for line in lines[-_LAST_LINES:])
