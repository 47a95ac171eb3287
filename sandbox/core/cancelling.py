"""Cancelling runs whose callers have left."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rollgym.sandbox.core.base import Sandbox
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.program import Program
from rollgym.sandbox.core.result import RunResult


class Cancellation:
    """Says, from any thread, that a run is to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._call: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End the run, or the one that is still to begin."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call()

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Register the function that ends the run for this context; call it at once if the run was cancelled."""
        with self._lock:
            self._call = call
            if self._cancelled:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._call = None


class CancellableSandbox(Sandbox, Protocol):
    """A back-end of this machine."""

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
        cancellation: Cancellation | None = None,
    ) -> RunResult:
        """Run a program to its end, or until it is cancelled; the result is then meaningless."""
