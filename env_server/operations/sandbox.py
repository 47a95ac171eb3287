"""The sandbox of a server, and programs that run in it to their end (`POST /run_code`)."""

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.event_loop import is_given_up
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.setting_sections import SandboxSettings
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.messages.validation import invalid, refuse_fields, requested
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.telemetry.metrics import Metrics
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.core.cancelling import CancellableSandbox, Cancellation
from rollgym.sandbox.core.program import LANGUAGES
from rollgym.sandbox.remote.run_code import Run, RunCodeRequest, build_reply, read_request
from rollgym.sandbox.selection import open_cancellable

_RETRY_AFTER_S = 1
_LIMITS = (
    *("max_runs", "max_waiting_runs", "max_run_s", "max_run_memory_mb"),
    *("max_program_sessions", "max_program_session_s"),
)


class ServedSandbox:
    """The sandbox, and the limits of its callers.

    Args:
        settings: Its back-end, and the upper limits of a program.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._opened: CancellableSandbox | None = None

    async def start(self) -> None:
        """Open it; it is looked at before anything runs in it.

        Raises:
            ConfigurationError: If it does not work here.
        """
        try:
            self._opened = await asyncio.to_thread(open_cancellable, self._settings.sandbox)
        except SandboxUnavailableError as error:
            raise ConfigurationError(f"sandbox: {error}") from error

    async def close(self) -> None:
        """End the sandbox and release its resources."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    @property
    def sandbox(self) -> CancellableSandbox:
        """The sandbox; the server opens it before it answers requests."""
        assert self._opened is not None, "the server starts its sandbox before it answers"
        return self._opened

    def check(self, request: RunCodeRequest, longest_s: float, setting: str) -> None:
        """Refuse a request that exceeds the limits of callers.

        Args:
            request: The request.
            longest_s: The longest run that is allowed, in seconds.
            setting: The name of the setting of that limit.

        Raises:
            ProblemError: `invalid_request`.
        """
        settings = self._settings
        if request.run_timeout > longest_s:
            raise invalid("run_timeout", f"at most {longest_s:g} (the server's {setting})")
        if request.compile_timeout > settings.max_run_s:
            raise invalid("compile_timeout", f"at most {settings.max_run_s:g} (the server's max_run_s)")
        asked = {
            "memory_limit_MB": request.memory_limit_MB,
            "limits.compile_memory_mb": request.limits.compile_memory_mb or 0,
        }
        for name, mib in asked.items():
            if mib > settings.max_run_memory_mb:
                raise invalid(name, f"at most {settings.max_run_memory_mb} (the server's max_run_memory_mb)")


class Slots:
    """A limit of concurrent uses, in all and for each token.

    Args:
        limit: In all.
        per_token: The limit of a token whose entry sets none.
        name: The setting of the limit.
        what: The name of the counted things, for people.
    """

    def __init__(self, limit: int, per_token: int, name: str, what: str) -> None:
        self._limit = limit
        self._per_token = per_token
        self._name = name
        self._what = what
        self._taken: Counter[str] = Counter()

    def take(self, caller: Caller) -> None:
        """Count one more.

        Raises:
            ProblemError: `at_capacity`.
        """
        of_token = caller.quota.max_runs or self._per_token
        if self._taken[caller.name] >= of_token:
            raise ProblemError(
                "at_capacity",
                f"this token has its {of_token} {self._what}; ask again when one has ended",
                retry_after=_RETRY_AFTER_S,
                limit=f"{self._name}_per_token",
            )
        if self._taken.total() >= self._limit:
            raise ProblemError(
                "at_capacity",
                f"this server has its {self._limit} {self._what}; ask again later, or ask another server",
                retry_after=_RETRY_AFTER_S,
                limit=self._name,
            )
        self._taken[caller.name] += 1

    def leave(self, name: str) -> None:
        """Count one less of a token."""
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]


class RunningCode:
    """The handlers of `run_code` and `sandbox`. Each run has a thread; a run that finds no free thread waits for one.

    Args:
        settings: How many run and wait, and their resource limits.
        served: The environments whose sandboxes run them.
        metrics: Counts runs.
    """

    def __init__(self, settings: SandboxSettings, served: ServedSandbox, metrics: Metrics) -> None:
        self._settings = settings
        self._served = served
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(settings.max_runs, thread_name_prefix="run-code")
        self._slots = Slots(
            settings.max_runs + settings.max_waiting_runs, settings.max_runs_per_token, "max_runs", "runs"
        )
        self._running: dict[asyncio.Future[Reply], Cancellation] = {}

    async def run_code(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Run a program, and cancel it when its last caller has left."""
        request = requested(RunCodeRequest, fields)
        run = asked_for(self._served, request, self._settings.max_run_s, "max_run_s")
        name = context.caller.name
        self._slots.take(context.caller)
        cancellation = Cancellation()
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._run, run, cancellation)
        )
        self._running[running] = cancellation
        running.add_done_callback(partial(self._ended, name))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not is_given_up():
                # All runs are, since the server ends.
                raise going_away() from None
            _give_up(running, cancellation)
            raise

    async def sandbox(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Return the guarantees of the sandbox, and the limits of requests."""
        refuse_fields(fields)
        return {
            "guarantees": asdict(self._served.sandbox.probe()),
            "languages": list(LANGUAGES),
            "limits": {name: getattr(self._settings, name) for name in _LIMITS},
        }

    async def idle(self, timeout: float) -> None:
        """Wait until nothing runs, but not for longer."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def close(self) -> None:
        """End all programs that still run."""
        for running, cancellation in list(self._running.items()):
            _give_up(running, cancellation)
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, run: Run, cancellation: Cancellation) -> Reply:
        """Run one program; called in a thread."""
        result = self._served.sandbox.run(
            run.program,
            files=run.files,
            stdin=run.stdin,
            limits=run.limits,
            collect=run.collect,
            cancellation=cancellation,
        )
        return build_reply(result, host=socket.gethostname())

    def _ended(self, name: str, running: "asyncio.Future[Reply]") -> None:
        del self._running[running]
        self._slots.leave(name)
        if running.cancelled():
            self._metrics.runs["cancelled"] += 1
        elif running.exception() is None:
            self._metrics.runs[running.result()["outcome"]] += 1


def asked_for(served: ServedSandbox, request: RunCodeRequest, longest_s: float, setting: str) -> Run:
    """Parse a request into a run, if it is within the limits.

    Raises:
        ProblemError: `invalid_request`.
    """
    served.check(request, longest_s, setting)
    try:
        return read_request(request)
    except ValueError as error:
        reason = str(error)
        raise ProblemError("invalid_request", reason, errors=[{"field": "", "reason": reason}]) from error


def _give_up(running: "asyncio.Future[Reply]", cancellation: Cancellation) -> None:
    """Remove a queued run, or end a running one, which frees its thread."""
    running.cancel()
    cancellation.cancel()
