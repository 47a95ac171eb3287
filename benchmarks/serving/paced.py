"""An open-loop load generator: steps are due at times that were drawn before, however slow the answers are.

A closed loop waits with the next request for the answer to the last one, so a server that stops for a while is asked
less in that while, and the wait is seen once. Here each latency counts from when the step was due.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from load import Load, OwnSocketConnection, close, open_all
from processes import cpu_seconds
from wire import Session

_SETTLE_S = 0.5
_DRAIN_TIMEOUT_S = 60.0


class Pacer(Load):
    """Hands each step that is due to a session that waits for nothing; the one that has rested longest is next."""

    def __init__(self, sessions: int) -> None:
        super().__init__(sessions)
        self.resting: deque[_PacedSlot] = deque()
        self.overdue: deque[float] = deque()
        self.latencies: list[float] = []
        self.lateness: list[float] = []
        self.drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outstanding = 0
        self.all_sent = False

    def due(self, at: float) -> None:
        """A step was due at a time; it is sent now, or as soon as a session has its answer."""
        self.outstanding += 1
        if self.resting:
            self.lateness.append(time.perf_counter() - at)
            self.resting.popleft().send(at)
        else:
            self.overdue.append(at)

    def answered(self, slot: "_PacedSlot", due: float) -> None:
        """A step has its answer; its session takes the next one that is overdue, or rests."""
        self.latencies.append(time.perf_counter() - due)
        self.outstanding -= 1
        self.rest(slot)
        if self.all_sent and not self.outstanding and not self.drained.done():
            self.drained.set_result(None)

    def rest(self, slot: "_PacedSlot") -> None:
        if self.overdue:
            slot.send(self.overdue.popleft())
        else:
            self.resting.append(slot)


class _PacedSlot:
    """One session, whose next request is at hand."""

    def __init__(self, pacer: Pacer, connection: "PacedConnection", session: Session) -> None:
        self._pacer = pacer
        self._connection = connection
        self._session = session
        self._due: float | None = None
        self._made = False
        _, self.request = next(session)

    def send(self, due: float) -> None:
        self._due = due
        self._connection.transport.write(self._connection.encode(self.request))

    def take(self, answer: bytes) -> None:
        _, self.request = self._session.send(answer)
        if not self._made:
            self._made = True
            self._pacer.first_step()
            self._pacer.rest(self)
        elif self._due is not None:
            due, self._due = self._due, None
            self._pacer.answered(self, due)


class PacedConnection(OwnSocketConnection):
    """A socket with any number of sessions; each is made at once and then waits for a step that is due."""

    def __init__(self, load: Load, sessions: Sequence[Session]) -> None:
        super().__init__(load, ())
        assert isinstance(load, Pacer)
        self._paced = [_PacedSlot(load, self, session) for session in sessions]
        self._alone = len(sessions) == 1

    def data_received(self, data: bytes) -> None:
        try:
            for answer in self.split(self._buffer + data if self._buffer else data):
                index = 0 if self._alone else int(answer[6 : answer.index(b",")])
                self._paced[index].take(answer)
        except Exception as error:  # noqa: BLE001 - it is raised where the load is waited for
            self._load.fail(error)

    def begin_sessions(self) -> None:
        self.transport.write(b"".join(self.encode(slot.request) for slot in self._paced))


async def run_paced(
    port: int, pid: int, groups: Sequence[Sequence[Session]], *, rate: float, seconds: float, seed: int
) -> dict[str, float]:
    """Ask for steps at exponential gaps, and tell how long after they were due they were answered."""
    pacer = Pacer(sum(map(len, groups)))
    connections = await open_all(port, PacedConnection, pacer, groups)
    try:
        await _either(pacer.stepped, pacer.failed)
        await asyncio.sleep(_SETTLE_S)
        generator = np.random.default_rng(seed)
        gaps = generator.exponential(1 / rate, size=int(rate * seconds))
        cpu = cpu_seconds(pid)
        begun = time.perf_counter()
        for at in (begun + np.cumsum(gaps)).tolist():
            while time.perf_counter() < at:
                # Timers of event loops are coarser than the gaps, and this process has its core for itself.
                await asyncio.sleep(0)
            if pacer.failed.done():
                break
            pacer.due(at)
        pacer.all_sent = True
        if pacer.outstanding:
            await _either(pacer.drained, pacer.failed)
        elapsed = time.perf_counter() - begun
        used = cpu_seconds(pid) - cpu
    finally:
        close(connections)
    return _summary(pacer, rate, elapsed, used)


def _summary(pacer: Pacer, rate: float, elapsed: float, used: float) -> dict[str, float]:
    latencies = 1e3 * np.sort(np.array(pacer.latencies))
    p50, p99, p999 = (float(np.quantile(latencies, at)) for at in (0.5, 0.99, 0.999))
    return {
        "wanted_steps_per_s": round(rate),
        "steps_per_s": round(len(latencies) / elapsed),
        "share": round(len(latencies) / elapsed / rate, 3),
        "server_cpu_us_per_step": round(1e6 * used / len(latencies), 1),
        "p50_ms": round(p50, 3),
        "p99_ms": round(p99, 3),
        "p999_ms": round(p999, 3),
        "max_ms": round(float(latencies[-1]), 3),
        "p99_over_p50": round(p99 / p50, 2),
        "generator_late_p99_ms": round(1e3 * float(np.quantile(pacer.lateness, 0.99)), 3),
    }


async def _either(wanted: asyncio.Future[None], failed: asyncio.Future[None]) -> None:
    done, _ = await asyncio.wait(
        (wanted, failed), timeout=_DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
    )
    if failed.done():
        failed.result()
    if not done:
        raise TimeoutError(f"the sessions were not answered within {_DRAIN_TIMEOUT_S:g} s")
