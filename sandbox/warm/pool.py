"""Warm sandboxes with an interpreter in each: many runs of Python a second, for less isolation between them."""

import json
import queue
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rollgym.sandbox.core.base import (
    Guarantees,
    Outcome,
    Program,
    RunResult,
    Sandbox,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.uploads import refused
from rollgym.sandbox.local.supervised import result_of_stage
from rollgym.sandbox.supervisor.monitor import HARD_OUTPUT_BYTES

_MIB = 1 << 20
_SOURCE = "main.py"
_SERVER_MEMORY_MB = 64
_GRACE_SECONDS = 2.0
_LIFETIME_SECONDS = 3600.0
_PREFIX = struct.Struct("<I")
# Errors of reading an invalid answer.
_GARBLED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


class WarmPool:
    """Runs Python programs by forking inside sandboxes that are kept warm; all other runs get fresh ones.

    Runs of one sandbox follow each other: each has a directory of its own, and nothing that it started or wrote is left
    when the next begins. They share a process namespace with the interpreter that forks them, which is the lower
    level that `fresh` declares. A sandbox is replaced after `runs_each` runs, and after any run that did not end by
    itself, left something behind, or wrote outside of its directory.

    Args:
        inner: The back-end that the sandboxes come from. The pool closes it.
        workers: The number of sandboxes, and so of concurrent runs.
        runs_each: After how many runs a sandbox is replaced.
        limits: The upper limits of a run. A run that asks for more gets a fresh sandbox.
    """

    def __init__(
        self, inner: Sandbox, *, workers: int = 2, runs_each: int = 200, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.name = f"warm {inner.name}"
        self._inner, self._limits, self._runs_each = inner, limits, runs_each
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._free.put(None)  # A place without a sandbox, which its first run makes.
        self._closed = threading.Event()

    def probe(self) -> Guarantees:
        """Probe the sandboxes that it is made of."""
        return replace(self._inner.probe(), fresh=False)

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
    ) -> RunResult:
        """Run a program to its end; its guarantees say whether it got a fresh sandbox."""
        if program.language != "python" or not self._fits(limits) or _SOURCE in _places(files):
            return self._inner.run(program, files=files, stdin=stdin, limits=limits, collect=collect)
        if (too_large := refused(program, files, limits)) is not None:
            return too_large
        laid = {**files, _SOURCE: program.source.encode(errors="surrogateescape")}
        with self._place() as place:
            try:
                worker = place.worker or _Worker(self._inner, self._limits)
            except SandboxUnavailableError as error:
                return RunResult(outcome=Outcome.SANDBOX_ERROR, detail=str(error))
            place.worker = None
            try:
                result, spotless = worker.run(program, laid, stdin, limits, list(collect))
            except BaseException:
                # No other code holds this worker, and it would live for an hour.
                worker.close()
                raise
            if spotless and worker.runs < self._runs_each:
                place.worker = worker
            elif worker.close().outcome is Outcome.MEMORY_LIMIT:
                # Only the whole sandbox knows that its processes together had too much.
                result = replace(
                    result,
                    outcome=Outcome.MEMORY_LIMIT,
                    detail=f"it needed more than {limits.memory_mb} MiB of memory",
                )
        return replace(result, guarantees=replace(result.guarantees or self.probe(), fresh=False))

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        """Start an interactive session with a program, in a fresh sandbox."""
        return self._inner.open_session(program, files=files, limits=limits)

    def close(self) -> None:
        """Close the warm sandboxes, once the running programs have ended."""
        self._closed.set()
        for _ in range(self._free.qsize()):
            worker = self._free.get()
            if worker is not None:
                worker.close()
        self._inner.close()

    def _fits(self, limits: Limits) -> bool:
        ours = self._limits
        return (
            limits.memory_mb <= ours.memory_mb
            and limits.disk_mb >= ours.disk_mb
            and limits.inodes >= ours.inodes
            and limits.pids >= ours.pids
        )

    @contextmanager
    def _place(self) -> "Iterator[_Place]":
        place = _Place(self._free.get())
        try:
            yield place
        finally:
            if self._closed.is_set() and place.worker is not None:
                place.worker.close()
                place.worker = None
            self._free.put(place.worker)


class _Place:
    """The place of a sandbox between runs."""

    def __init__(self, worker: "_Worker | None") -> None:
        self.worker = worker


class _Worker:
    """One warm sandbox, and the session of its server."""

    def __init__(self, inner: Sandbox, limits: Limits) -> None:
        self.runs = 0
        self._limits = limits
        session_limits = replace(
            limits,
            wall_seconds=_LIFETIME_SECONDS,
            cpu_seconds=_LIFETIME_SECONDS,
            memory_mb=limits.memory_mb + _SERVER_MEMORY_MB,
            pids=limits.pids + 1,
        )
        self._session = inner.open_session(Program("python", _server_source()), limits=session_limits)
        self._received = bytearray()

    def run(
        self, program: Program, files: Mapping[str, bytes], stdin: bytes, limits: Limits, collect: list[str]
    ) -> tuple[RunResult, bool]:
        """Run a program; return whether the sandbox is as it was before."""
        self.runs += 1
        cpu_seconds = limits.cpu_seconds or limits.wall_seconds + 1
        head = {
            "names": list(files),
            "arguments": list(program.arguments),
            "collect": collect,
            "most_bytes": limits.output_kb << 10,
            "wall_seconds": limits.wall_seconds,
            "keep_bytes": limits.output_kb << 10,
            "hard_bytes": HARD_OUTPUT_BYTES,
            "limits": {
                "RLIMIT_CPU": max(1, int(-(-cpu_seconds // 1))),
                "RLIMIT_AS": limits.memory_mb * _MIB,
                "RLIMIT_NOFILE": limits.open_files,
            },
        }
        message = _message(head, [program.source.encode(errors="surrogateescape"), stdin, *files.values()])
        began = time.monotonic()
        try:
            self._session.write(message)
            answer = self._answer(began + limits.wall_seconds + _GRACE_SECONDS)
            ended = None if answer is None else _ended(*answer, limits)
        except (BrokenPipeError, *_GARBLED):
            ended = None
        return (self._lost(limits, time.monotonic() - began), False) if ended is None else ended

    def close(self) -> RunResult:
        """End the sandbox, and return its result."""
        return self._session.close()

    def _lost(self, limits: Limits, seconds: float) -> RunResult:
        """Return the result of a program that took the sandbox down, or stopped it."""
        ended = self._session.close()
        if ended.outcome in (Outcome.MEMORY_LIMIT, Outcome.SANDBOX_ERROR):
            return replace(ended, wall_seconds=seconds)
        if seconds >= limits.wall_seconds:
            return replace(
                ended,
                outcome=Outcome.TIME_LIMIT,
                wall_seconds=seconds,
                detail=f"it ran longer than {limits.wall_seconds:g} s",
            )
        return replace(
            ended, outcome=Outcome.NON_ZERO_EXIT, wall_seconds=seconds, detail="it ended its warm sandbox"
        )

    def _answer(self, deadline: float) -> tuple[dict[str, Any], list[bytes]] | None:
        """Wait for the answer; None if it does not come."""
        prefix = self._exactly(_PREFIX.size, deadline)
        text = None if prefix is None else self._exactly(_PREFIX.unpack(prefix)[0], deadline)
        if text is None:
            return None
        head = json.loads(text)
        blobs = []
        for size in head["sizes"]:
            if size < 0:
                raise ValueError("a size is negative")
            blob = self._exactly(size, deadline)
            if blob is None:
                return None
            blobs.append(blob)
        return head, blobs

    def _exactly(self, count: int, deadline: float) -> bytes | None:
        while len(self._received) < count:
            data = self._session.read(max(0.0, deadline - time.monotonic()))
            if not data:
                return None
            self._received += data
        data = bytes(self._received[:count])
        del self._received[:count]
        return data


def _ended(facts: Mapping[str, Any], blobs: list[bytes], limits: Limits) -> tuple[RunResult, bool]:
    """Read how a run ended, and whether its sandbox is as it was before."""
    result = result_of_stage(
        {"memory_exhausted": False, "pids_refused": False, **facts},
        blobs[:2],
        limits,
        None,
    )
    files = dict(zip(facts["names"], blobs[2:], strict=True))
    return replace(result, files=files), bool(facts["spotless"])


def _places(files: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in files}


def _message(head: Mapping[str, Any], blobs: list[bytes]) -> bytes:
    text = json.dumps({**head, "sizes": [len(blob) for blob in blobs]}).encode()
    return _PREFIX.pack(len(text)) + text + b"".join(blobs)


@cache
def _server_source() -> str:
    return Path(__file__).with_name("warm_server.py").read_text()
