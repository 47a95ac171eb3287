"""The fleet of the soak with fail-overs: its journal is a Redis server with a replica that lags, and takes over."""

import argparse
import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis
from failover_progress import FailoverProgress
from gateway_fleet import Fleet
from progress import Progress
from run import Server

GAMES = ("Ledger-v0", "InlineLedger-v0")
_LEDGER = "benchmarks.soak.ledger:Ledger"
SERVED = (
    *("--no-builtin", "--env", f"{GAMES[0]}={_LEDGER}", "--isolation", f"{GAMES[0]}=process"),
    *("--env", f"{GAMES[1]}={_LEDGER}", "--isolation", f"{GAMES[1]}=inline"),
    *("--processes", "2", "--workers", "1"),
)
# The replica takes over so long after the last write that has reached it.
LAGS_S = (0.5, 4.0)
_FAILOVER = "fail-over"
_PATIENCE_S = 60.0
# Below those that the kernel gives to connections.
_PORTS = 20_000, 30_000


class ReplicatedJournal:
    """Two Redis servers: one has the port that gateways know, and the other follows it until it takes the port over.

    Args:
        place: A directory for both.
    """

    def __init__(self, place: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("this needs redis-server (apt-get install redis-server)")
        self._program = program
        self._places = [Path(place, "journal-a"), Path(place, "journal-b")]
        for each in self._places:
            each.mkdir()
        self.port, self._replica_port = _free_ports(2)
        self._processes: list[subprocess.Popen[bytes] | None] = [None, None]
        self._master = 0

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The server that has the port."""
        return self._processes[self._master]

    def start(self) -> "ReplicatedJournal":
        """Start both."""
        self._start(self._master, self.port)
        self._start(1 - self._master, self._replica_port, "--replicaof", "127.0.0.1", str(self.port))
        return self

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End both."""
        for process in self._processes:
            if process is not None:
                process.send_signal(number)
                process.wait(_PATIENCE_S)

    def leave_behind(self) -> None:
        """Let the replica follow no further, once it has all that there is."""
        with redis.Redis(port=self._replica_port) as replica:
            _until(lambda: replica.info("replication").get("master_link_status") == "up")
            replica.replicaof("NO", "ONE")

    def take_over(self) -> None:
        """Kill the one with the port, and give this to the other one, whose state is older."""
        killed = self.process
        assert killed is not None
        killed.kill()
        killed.wait(_PATIENCE_S)
        with redis.Redis(port=self._replica_port) as replica:
            replica.config_set("port", self.port)
        self._master = 1 - self._master

    def follow(self) -> None:
        """Start the one that was killed; it follows the other one from now on."""
        self._start(1 - self._master, self._replica_port, "--replicaof", "127.0.0.1", str(self.port))

    def _start(self, number: int, port: int, *more: str) -> None:
        command = [
            *(self._program, "--dir", str(self._places[number]), "--port", str(port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
            # A replica begins at once, and not after five seconds.
            *("--repl-diskless-sync-delay", "0", *more),
        ]
        self._processes[number] = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        with redis.Redis(port=port) as server:
            _until(lambda: _answers(server))


class FailoverFleet(Fleet):
    """Three gateways, four nodes with two I/O processes each, and the journal.

    Args:
        place: A directory for all of them.
        progress: Where it is noted what may be lost.
        replicas: How many replicas the gateways require; with any, nothing may be lost.
    """

    kinds = ("gateway", "node", "node", "I/O process", "worker")

    def __init__(self, place: str, progress: FailoverProgress, replicas: int) -> None:
        self._progress = progress
        self._replicas = replicas
        self._failing_over: list[asyncio.Task[None]] = []
        self.replicated = ReplicatedJournal(place)
        super().__init__(
            place,
            journal=self.replicated.start(),
            served=SERVED,
            games=GAMES,
            gateway_options=("--journal-replicas", str(replicas)),
        )

    def plan(self, options: argparse.Namespace, chance: random.Random) -> list[tuple[float, str, float]]:
        """The same, with fail-overs; with each of these goes a node, whose sessions have to be begun anew."""
        plan = super().plan(options, chance)
        for number in range(options.failovers):
            at_s = 60 * options.minutes * (number + chance.uniform(0.3, 0.8)) / options.failovers
            which = chance.random()
            plan += [(at_s, _FAILOVER, which), (at_s + _lag_s(which), "node", chance.random())]
        return plan

    async def fire(self, options: argparse.Namespace, progress: Progress) -> None:
        """The same, to the end of the last fail-over."""
        await super().fire(options, progress)
        await asyncio.gather(*self._failing_over)

    async def strike(self, kind: str, which: float, able: list[Server]) -> Server | None:
        """Kill something; gives the server that has to be started again, if one has."""
        if kind in ("gateway", "node"):
            return await super().strike(kind, which, able)
        if kind == _FAILOVER:
            self._failing_over.append(asyncio.create_task(self._fail_over(_lag_s(which))))
            return None
        pids = [pid for node in able for pid in node.descendants()[kind]]
        if pids:
            os.kill(pids[int(which * len(pids))], signal.SIGKILL)
        return None

    async def _fail_over(self, lag_s: float) -> None:
        """Let the journal go back by so many seconds."""
        await asyncio.to_thread(self.replicated.leave_behind)
        failover = None if self._replicas else self._progress.left_behind()
        await asyncio.sleep(lag_s)
        await asyncio.to_thread(self.replicated.take_over)
        if failover is not None:
            failover.ends(time.monotonic())
        await asyncio.to_thread(self.replicated.follow)


def _lag_s(which: float) -> float:
    shortest, longest = LAGS_S
    return shortest + which * (longest - shortest)


def _free_ports(count: int) -> list[int]:
    """Ports that no connection is given while their server is away."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(*_PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    return found


def _answers(server: "redis.Redis") -> bool:
    try:
        return bool(server.ping())
    except redis.ConnectionError:
        # It listens not yet, or reads what it had written.
        return False


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("a journal's server does not get ready")
        time.sleep(0.02)
