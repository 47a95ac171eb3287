"""The counters of one I/O process, as plain numbers, and how long things took, counted in buckets.

`operations/reports.py` turns them into Prometheus' text.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from typing import Any, Literal, NamedTuple

import numpy as np

from rollgym.clients.protocol.errors import RETRY_LATER, ProblemError

BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""The upper bounds of the buckets, in seconds; longer durations go to one more."""


TIMED_STEPS = 16
"""Of steps that do not wait, each 16th is timed and counts for 16: timing all would cost a few percent."""

LONG_S = 0.1
"""Operations of at least this duration are recorded by name: in the event loop, all clients have waited for them."""

_MOST_LONG = 64
OTHER = "other"
"""The label of all environments that have none of their own."""
EpisodeOutcome = Literal["success", "terminated", "truncated", "error", "abandoned"]
"""How an episode ended. One that was reset or closed before its end is abandoned."""

RebuildOutcome = Literal["ok", "diverged", "failed"]
# Of capacity there are several kinds: their limits' names stand for it.
_LIMITS = frozenset({"max_sessions", "max_sessions_per_token", "max_runs", "max_runs_per_token"})
_REFUSALS = RETRY_LATER - {"at_capacity"} | _LIMITS


class Durations:
    """A histogram of plain numbers: no lock and no label look-up, since it is added to at every step.

    Attributes:
        counts: How many durations are in each bucket.
        total: Their sum, in seconds.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration, which may stand for several."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times


class LongRun(NamedTuple):
    """An operation that took long.

    Attributes:
        op: The operation.
        env_id: The environment's id.
        seconds: The duration.
        ended: When, on the clock of `time.perf_counter`.
    """

    op: str
    env_id: str
    seconds: float
    ended: float


class OperationTimes:
    """How long the operations of one kind of worker took, by operation.

    Attributes:
        ran: The time that the environment took.
        waited: The time before that, in which the worker did other things.
    """

    def __init__(self) -> None:
        self.ran: defaultdict[str, Durations] = defaultdict(Durations)
        self.waited: defaultdict[str, Durations] = defaultdict(Durations)
        self._long: deque[LongRun] = deque(maxlen=_MOST_LONG)

    def note_long(self, op: str, env_id: str, seconds: float) -> None:
        """Keep an operation that took `LONG_S` or more, and has just ended."""
        self._long.append(LongRun(op, env_id, seconds, time.perf_counter()))

    def taken_long(self) -> list[LongRun]:
        """The latest operations that took long; each is given once."""
        found = list(self._long)
        self._long.clear()
        return found


class EnvironmentLabels:
    """Gives labels to environments that other servers register; only the first ones get labels of their own.

    Counters live as long as the process. Without a bound, servers that register ever new environments could fill its
    memory, and that of the database that collects the counters.

    Args:
        most: How many environments get a label of their own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._others = False

    @property
    def given(self) -> set[str]:
        """The labels that environments were given so far."""
        return self._known | ({OTHER} if self._others else set())

    def of(self, env_id: str) -> str:
        """The label of an environment that is registered."""
        if env_id not in self._known:
            if len(self._known) >= self._most:
                self._others = True
                return OTHER
            self._known.add(env_id)
        return env_id


class Metrics:
    """Counters of one I/O process.

    What is counted at every step is a plain number in a dictionary or an attribute, and becomes a metric at a scrape: a
    locked counter object would cost as much as the rest of a step's handling. Counters by environment are under its
    label, which is its id unless there are too many (`EnvironmentLabels`).

    Args:
        labels: Gives registered environments their labels.

    Attributes:
        answered: Operations that were answered well.
        failed: Operations that were answered by a problem, by operation and code.
        problems: Answers that were problems, by code, including answers to unknown operations.
        refusals: Requests refused for lack of capacity, by reason.
        seconds: How long operations took from the call to the answer, by operation.
        steps: Steps by environment.
        resets: Episodes begun by environment.
        expert_resets: Those among them with expert actions.
        episodes: Episodes ended, by environment and outcome.
        verdicts: Verdicts by environment and outcome.
        runs: Programs of `run_code` by how they ended.
        rebuilds: Environments rebuilt by replay, by environment and outcome.
        sessions_ended: Sessions that ended, by reason.
        sockets: Open sockets.
        sockets_opened: Sockets that were opened.
        http_received: Bytes of request bodies.
        http_sent: Bytes of response bodies.
        socket_received: Bytes of frames that came in.
        socket_sent: Bytes of frames that went out.
        loop_lag: How late the event loop ran its timers.
        loop_holds: Operations that blocked it, by environment, operation and isolation.
        upstream_seconds: How long registered servers took, by operation and protocol.
        upstream_errors: Calls that they failed, by environment and protocol.
        failovers: Operations tried again on another registered server, by environment.
        registrations_ended: Registrations that ended, by environment and reason.
    """

    def __init__(self, labels: EnvironmentLabels) -> None:
        self.labels = labels
        self.answered: defaultdict[str, int] = defaultdict(int)
        self.failed: Counter[tuple[str, str]] = Counter()
        self.problems: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.seconds: defaultdict[str, Durations] = defaultdict(Durations)
        self.steps: defaultdict[str, int] = defaultdict(int)
        self.resets: Counter[str] = Counter()
        self.expert_resets: Counter[str] = Counter()
        self.episodes: Counter[tuple[str, EpisodeOutcome]] = Counter()
        self.verdicts: Counter[tuple[str, str]] = Counter()
        self.runs: Counter[str] = Counter()
        self.rebuilds: Counter[tuple[str, RebuildOutcome]] = Counter()
        self.sessions_ended: Counter[str] = Counter()
        self.sockets = 0
        self.sockets_opened = 0
        self.http_received = 0
        self.http_sent = 0
        self.socket_received = 0
        self.socket_sent = 0
        self.loop_lag = Durations()
        self.loop_holds: Counter[tuple[str, str, str]] = Counter()
        self.upstream_seconds: defaultdict[tuple[str, str], Durations] = defaultdict(Durations)
        self.upstream_errors: Counter[tuple[str, str]] = Counter()
        self.failovers: Counter[str] = Counter()
        self.registrations_ended: Counter[tuple[str, str]] = Counter()

    def operation_failed(self, op: str, problem: ProblemError) -> None:
        """Count an operation that is answered by a problem."""
        self.failed[op, problem.code] += 1
        reason = problem.extra.get("limit") if problem.code == "at_capacity" else problem.code
        # A node may name anything.
        if isinstance(reason, str) and reason in _REFUSALS:
            self.refusals[reason] += 1

    def episode_finished(self, label: str, info: Any, *, terminated: bool) -> None:
        """Count an episode that came to its end, by the outcome of its last step."""
        success = info.get("success")
        if isinstance(success, bool | np.bool_) and success:
            outcome: EpisodeOutcome = "success"
        else:
            outcome = "terminated" if terminated else "truncated"
        self.episodes[label, outcome] += 1
