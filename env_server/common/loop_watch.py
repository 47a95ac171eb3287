"""Measures how late the event loop runs its timers, and which environment blocked it."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping

from rollgym.clients.measuring.metrics import queued_seconds
from rollgym.clients.protocol.messages import Isolation
from rollgym.env_server.common.metrics import LONG_S, LongRun, Metrics, OperationTimes

_INTERVAL_S = 0.5
# An operation in a thread is not blamed for shorter delays: others run beside it.
_LATE_S = 0.25
_TOLD_AGAIN_S = 60.0
_STANDSTILL_S = 5.0

_log = logging.getLogger(__name__)


class LoopWatch:
    """Sets a timer again and again, measures how late it fires, and names the operation that blocked the loop.

    A blocked loop delays all clients: the cause is a slow environment that runs inline, or one in a thread whose code
    holds the interpreter lock (a regular expression, an extension in C).

    Args:
        metrics: Counts the delays.
        times: The durations of operations of environments in this process, the inline ones first.
    """

    def __init__(self, metrics: Metrics, times: Mapping[Isolation, OperationTimes]) -> None:
        self._metrics = metrics
        self._times = times
        self._due = 0.0
        self._queued_s = 0.0
        self._late: list[tuple[float, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._told_until: dict[tuple[str, str], float] = {}

    def start(self) -> None:
        """Start to watch; earlier delays are not counted."""
        for times in self._times.values():
            times.taken_long()
        self._arm()

    def stop(self) -> None:
        """Stop watching the event loop."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def late_s(self) -> float:
        """How late the next look is by now."""
        return time.perf_counter() - self._due

    def _arm(self) -> None:
        # Not the loop's clock: that stands still while the loop is busy.
        self._due = time.perf_counter() + _INTERVAL_S
        self._queued_s = queued_seconds() or 0.0
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._look)

    def _look(self) -> None:
        late = max(0.0, self.late_s)
        self._metrics.loop_lag.add(late)
        # On a loaded machine the loop's thread waits for a processor, which no environment is to blame for.
        queued_s = (queued_seconds() or 0.0) - self._queued_s
        if late - queued_s >= _LATE_S:
            self._late.append((self._due, late))
        kept_here = False
        for isolation, times in self._times.items():
            for run in times.taken_long():
                if isolation == "inline":
                    if run.seconds - queued_s < LONG_S:
                        continue
                    kept_here = True
                    self._count(
                        run, "inline", f"took {run.seconds:.2f} s, and everybody on this process waited"
                    )
                elif not kept_here and (missed := self._missed_during(run)) is not None:
                    what = f"ran in a thread for {run.seconds:.2f} s, and the event loop had no turn for {missed:.2f} s"
                    self._count(run, "thread", what)
        # The end of an operation in a thread may be reported after the first look that it delayed.
        self._late = [each for each in self._late if each[0] == self._due]
        self._arm()

    def _missed_during(self, run: LongRun) -> float | None:
        """How late a look was that was due while something ran; None if none was late."""
        began = run.ended - run.seconds
        return next((late for due, late in self._late if began <= due <= run.ended), None)

    def _count(self, run: LongRun, isolation: Isolation, what: str) -> None:
        """Count it, and write it to the log, once in a while for each operation of an environment."""
        self._metrics.loop_holds[run.env_id, run.op, isolation] += 1
        now = time.perf_counter()
        if now < self._told_until.get((run.env_id, run.op), 0.0):
            return
        self._told_until[run.env_id, run.op] = now + _TOLD_AGAIN_S
        _log.warning(
            "%s of %s %s: `--isolation %s=process` keeps it from others",
            *(run.op, run.env_id, what, run.env_id),
            extra={"env_id": run.env_id},
        )


class StandstillWatch:
    """A thread that logs the stack of a blocked event loop, which the loop itself cannot do.

    Used as a context manager, in the thread of the loop.

    Args:
        watch: The watch whose timer the loop runs late.
        after_s: The delay to report, in seconds.
    """

    def __init__(self, watch: LoopWatch, after_s: float = _STANDSTILL_S) -> None:
        self._watch = watch
        self._after_s = after_s
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="standstill", daemon=True)

    def __enter__(self) -> "StandstillWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        looks = 0
        while not self._ended.wait(self._after_s / 4):
            if self._watch.late_s < self._after_s:
                looks = 0
                continue
            looks += 1
            # Not at the first look: if the whole process was stopped, this thread and the loop resume together.
            if looks == 2:
                frames = sys._current_frames().get(self._loop_thread)
                _log.error(
                    "the event loop stands still for %.0f s, and with it everybody on this process, in\n%s",
                    *(self._watch.late_s, "".join(traceback.format_stack(frames)).rstrip()),
                )
