"""Where a server breaks: ever more sessions that step, and what becomes of their frames, while and after they do.

    python benchmarks/serving/overload.py --out benchmarks/results/overload.json

Each session takes a step, rests for a time that is drawn (one second on average) and takes the next one: so many
sessions ask for as many steps a second. The server has one core, and this process, which plays them, has another. Where
the server answers `overloaded`, the session comes again as `EnvClient` does. After some seconds nothing more is sent,
and it is counted what is still unanswered. `--before PATH` is another checkout, measured beside this one.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import processes
import rounds
import uvloop
from contenders import OWN_SERVER
from load import Load, OwnSocketConnection
from rounds import Rows, progress

_ENV_ID = "FrozenLake-v0"
_MADE_AT_ONCE = 256
_TICK_S = 0.01
_SOCKETS = 64
_AFTER_S = (1.0, 4.0)
_GIVE_UP_S = 60.0
_MAX_DELAY_S = 60.0


class Timetable:
    """Sessions by the hundredth of a second in which their next frame is due."""

    def __init__(self) -> None:
        self._due: defaultdict[int, list[_Session]] = defaultdict(list)
        self._next = self._tick(time.perf_counter())

    def add(self, session: "_Session", delay_s: float) -> None:
        self._due[max(self._next, self._tick(time.perf_counter() + delay_s))].append(session)

    def taken(self) -> list["_Session"]:
        """Those that are due by now."""
        now = self._tick(time.perf_counter())
        found = [session for tick in range(self._next, now) for session in self._due.pop(tick, ())]
        self._next = max(self._next, now)
        return found

    @staticmethod
    def _tick(at: float) -> int:
        return int(at / _TICK_S)


class Tally:
    """What became of the frames of one case."""

    def __init__(self) -> None:
        self.steps = self.refused = self.others = self.unanswered = 0
        self.waits: list[float] = []
        self.step_times: list[float] = []
        self.open = True
        self.done: asyncio.Future[None] | None = None

    def answered(self) -> None:
        self.unanswered -= 1
        if self.done is not None and not self.unanswered and not self.done.done():
            self.done.set_result(None)


class _Session:
    __slots__ = ("_head", "asked_at", "at", "connection", "episode", "refusals", "sent_at")

    def __init__(self, connection: "_Connection", index: int, session_id: str) -> None:
        self.connection = connection
        step = {
            "id": index,
            "op": "step",
            "session_id": session_id,
            "action": "<answer>Left</answer>",
            "autoreset": True,
        }
        self._head = orjson.dumps(step)[:-1]
        self.episode = self.at = self.refusals = 0
        self.asked_at = self.sent_at = 0.0

    def frame(self) -> bytes:
        return b'%b,"episode":%d,"step":%d}' % (self._head, self.episode, self.at)


class _Connection(OwnSocketConnection):
    """A socket, its sessions, and what is to be sent at the end of a tick."""

    def __init__(self, load: Load, tally: Tally, timetable: Timetable, rest_s: float, seed: int) -> None:
        super().__init__(load, ())
        self._tally = tally
        self._timetable = timetable
        self._rest_s = rest_s
        self._jitter = random.Random(seed)
        self._sessions: list[_Session] = []
        self._outbox: list[bytes] = []
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._made: deque[asyncio.Future[Any]] = deque()

    def begin_sessions(self) -> None:
        self.opened.set_result(None)

    async def make(self, count: int) -> None:
        """Make sessions, which begin to step at times of their own."""
        for first in range(0, count, _MADE_AT_ONCE):
            size = min(_MADE_AT_ONCE, count - first)
            fields = {"id": "make", "op": "make", "env_id": _ENV_ID, "count": size, "reset": {"seed": first}}
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._made.append(answer)
            self.transport.write(self.encode(orjson.dumps(fields)))
            for each in (await answer)["ok"]["sessions"]:
                self._sessions.append(_Session(self, len(self._sessions), each["session_id"]))

    def start(self) -> None:
        for session in self._sessions:
            self._timetable.add(session, self._jitter.expovariate(1 / self._rest_s))

    def post(self, session: _Session, now: float) -> None:
        """Send a session's next frame at the end of the tick."""
        if not session.refusals:
            session.asked_at = now
        session.sent_at = now
        self._tally.unanswered += 1
        self._outbox.append(self.encode(session.frame()))

    def flush(self) -> None:
        if self._outbox:
            self.transport.write(b"".join(self._outbox))
            self._outbox.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for answer in self.split(self._buffer + data if self._buffer else data):
                self._take(answer)
        except Exception as error:  # noqa: BLE001 - it is raised where the load is waited for
            self._load.fail(error)

    def _take(self, answer: bytes) -> None:
        if self._made:
            self._made.popleft().set_result(orjson.loads(answer))
            return
        session = self._sessions[int(answer[6 : answer.index(b",")])]
        tally, now = self._tally, time.perf_counter()
        tally.answered()
        if tally.open:
            tally.waits.append(now - session.sent_at)
        if b'"reward":' in answer:
            if tally.open:
                tally.steps += 1
                tally.step_times.append(now - session.asked_at)
            session.at, session.refusals = session.at + 1, 0
            if b'"truncated":true' in answer:
                session.episode, session.at = session.episode + 1, 0
            delay = self._jitter.expovariate(1 / self._rest_s)
        else:
            problem = orjson.loads(answer)["error"]
            if problem["code"] == "overloaded":
                tally.refused += tally.open
            else:
                tally.others += 1
            growth = 1.5 ** min(session.refusals, 8)
            asked = problem["retry_after"] * growth * self._jitter.uniform(1, 1.5)
            session.refusals += 1
            delay = min(_MAX_DELAY_S, asked)
        if tally.open:
            self._timetable.add(session, delay)


async def overload(server: processes.Server, sessions: int, options: argparse.Namespace) -> dict[str, float]:
    """One case on a fresh server."""
    loop = asyncio.get_running_loop()
    load, tally, timetable = Load(0), Tally(), Timetable()
    connections: list[_Connection] = []
    for number in range(_SOCKETS):
        _, connection = await loop.create_connection(
            lambda number=number: _Connection(load, tally, timetable, options.rest, number),
            "127.0.0.1",
            server.port,
        )
        connections.append(connection)
    try:
        await asyncio.gather(*(each.opened for each in connections))
        for each in connections:
            await each.make(sessions // _SOCKETS)
        for each in connections:
            each.start()
        cpu, own_cpu, begun = processes.cpu_seconds(server.pid), time.process_time(), time.perf_counter()
        await _play(timetable, connections, load, begun + options.seconds)
        tally.open = False
        elapsed = time.perf_counter() - begun
        used, own = processes.cpu_seconds(server.pid) - cpu, time.process_time() - own_cpu
        left = await _left(tally)
    finally:
        for each in connections:
            each.transport.abort()
    return _summary(tally, sessions / options.rest, elapsed, used, own, left)


async def _play(timetable: Timetable, connections: Sequence[_Connection], load: Load, end: float) -> None:
    while (now := time.perf_counter()) < end:
        for session in timetable.taken():
            session.connection.post(session, now)
        for each in connections:
            each.flush()
        if load.failed.done():
            load.failed.result()
        await asyncio.sleep(max(0.0, now + _TICK_S - time.perf_counter()))


async def _left(tally: Tally) -> dict[str, float]:
    """How many frames are unanswered some seconds after nothing more is sent, and when the last one is answered."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    found: dict[str, float] = {"unanswered_at_end": tally.unanswered}
    tally.done = loop.create_future()
    for after_s in _AFTER_S:
        if tally.unanswered:
            await asyncio.wait((tally.done,), timeout=begun + after_s - loop.time())
        found[f"unanswered_{after_s:g}_s_later"] = tally.unanswered
    if tally.unanswered:
        await asyncio.wait((tally.done,), timeout=begun + _GIVE_UP_S - loop.time())
    found["last_answer_s"] = round(loop.time() - begun, 2)
    found["never_answered"] = tally.unanswered
    return found


def _summary(
    tally: Tally, wanted: float, elapsed: float, used: float, own: float, left: dict[str, float]
) -> dict[str, float]:
    waits, steps = np.array(tally.waits), np.array(tally.step_times)
    return {
        "wanted_steps_per_s": round(wanted),
        "steps_per_s": round(tally.steps / elapsed),
        "refused_per_s": round(tally.refused / elapsed),
        "other_problems": tally.others,
        "answer_p50_s": round(float(np.quantile(waits, 0.5)), 3),
        "answer_p99_s": round(float(np.quantile(waits, 0.99)), 3),
        "answer_max_s": round(float(waits.max()), 3),
        "step_p99_s": round(float(np.quantile(steps, 0.99)), 3),
        **left,
        "server_cores": round(used / elapsed, 2),
        "load_cores": round(own / elapsed, 2),
    }


def measure(options: argparse.Namespace) -> Rows:
    """A fresh server for every case; checkouts take turns."""
    roots = {"this": processes.ROOT, **({} if options.before is None else {"before": options.before})}
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        for sessions in options.sessions:
            for label, root in roots.items():
                with processes.server((sys.executable, *OWN_SERVER), root) as server:
                    found = uvloop.run(overload(server, sessions, options))
                found["load_average"] = processes.load_average()
                rows[label, sessions].append(found)
                progress(f"round {number + 1}: {label}, {sessions}: {found}")
    return rows


_SHOWN = {
    "wanted_steps_per_s": "wanted steps/s",
    "steps_per_s": "steps/s",
    "refused_per_s": "refused/s",
    "answer_p50_s": "answer p50, s",
    "answer_p99_s": "p99",
    "answer_max_s": "longest",
    "unanswered_at_end": "unanswered at the end",
    "unanswered_1_s_later": "1 s later",
    "unanswered_4_s_later": "4 s later",
    "last_answer_s": "last answer after, s",
    "server_cores": "server's cores",
    "load_cores": "load's cores",
}


def main() -> None:
    parser = rounds.parser(__doc__, rounds=1, seconds=10.0)
    parser.add_argument("--sessions", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 49152, 65536])
    parser.add_argument("--rest", type=float, default=1.0, help="seconds that a session rests, on average")
    parser.add_argument("--before", type=Path, help="another checkout to measure beside this one")
    options = parser.parse_args()
    processes.allow_many_files()
    processes.pin_load()
    paths = {} if options.before is None else {str(options.before): "BEFORE"}
    result = rounds.record("benchmarks/serving/overload.py", options, {"rollgym": sys.executable}, paths)
    result["cases"] = rounds.medians(measure(options))
    rounds.write(result, options.out)
    rows = [
        (each["who"], f"{each['sessions']:,}", *(rounds.shown(each[name]) for name in _SHOWN))
        for each in result["cases"]
    ]
    print(rounds.about(result, result["cases"]))
    print()
    print(rounds.table(("checkout", "sessions", *_SHOWN.values()), rows))


if __name__ == "__main__":
    main()
