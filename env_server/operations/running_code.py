"""`POST /run_code`: programs of trainers in this server's sandbox."""

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from clients.protocol.errors import ProblemError
from env_server.access.context import Context
from env_server.common.lifecycle import going_away
from env_server.common.pending import is_given_up
from env_server.common.settings import Settings
from env_server.messages.fields import own_fields, refuse_fields
from env_server.messages.validation import validate
from env_server.operations.served_sandbox import Places, ServedSandbox
from env_server.sessions.replies import Reply
from env_server.telemetry.metrics import Metrics
from sandbox.core.cancelling import Cancellation
from sandbox.core.program import LANGUAGES
from sandbox.remote.run_code import Run, RunCodeRequest, build_reply, read_request


class RunningCode:
    """The handlers of `run_code` and `sandbox`. Each run has a thread; who finds none free waits for one.

    Args:
        settings: How many run and wait, and what they may use.
        served: Where they run.
        metrics: Where runs are counted.
    """

    def __init__(self, settings: Settings, served: ServedSandbox, metrics: Metrics) -> None:
        self._settings = settings
        self._served = served
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(settings.max_runs, thread_name_prefix="run-code")
        self._places = Places(
            settings.max_runs + settings.max_waiting_runs, settings.max_runs_per_token, "max_runs", "runs"
        )
        self._running: dict[asyncio.Future[Reply], Cancellation] = {}

    async def run_code(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Run a program, and give it up when nobody waits for it any more."""
        run = asked_for(self._served, own_fields(fields), self._settings.max_run_s, "max_run_s")
        name = context.caller.name
        self._places.take(context.caller)
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
        """Say what the sandbox keeps to, and what may be asked of it."""
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
        """End what still runs."""
        for running, cancellation in list(self._running.items()):
            _give_up(running, cancellation)
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, run: Run, cancellation: Cancellation) -> Reply:
        """In a thread."""
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
        self._places.leave(name)
        if running.cancelled():
            self._metrics.runs["cancelled"] += 1
        elif running.exception() is None:
            self._metrics.runs[running.result()["outcome"]] += 1


_LIMITS = (
    *("max_runs", "max_waiting_runs", "max_run_s", "max_run_memory_mb"),
    *("max_program_sessions", "max_program_session_s"),
)


def asked_for(served: ServedSandbox, fields: Mapping[str, Any], longest_s: float, setting: str) -> Run:
    """What a request asks for, if it may be asked for.

    Raises:
        ProblemError: `invalid_request`.
    """
    request = validate(RunCodeRequest, fields)
    served.check(request, longest_s, setting)
    try:
        return read_request(request)
    except ValueError as error:
        reason = str(error)
        raise ProblemError("invalid_request", reason, errors=[{"field": "", "reason": reason}]) from error


def _give_up(running: "asyncio.Future[Reply]", cancellation: Cancellation) -> None:
    """Take out of the queue what has not begun; end what runs, and free its thread with it."""
    running.cancel()
    cancellation.cancel()
