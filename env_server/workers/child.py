"""The worker child process: holds environments and runs one operation after another on them.

It is started by `ChildProcess` with one end of a socket pair. The output of environments goes to the server's log. The
child exits when the server has died, even while an environment hangs.
"""

import gc
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.clients.protocol.spaces import describe_space
from rollgym.env_server.common.logs import LogFormat, configure_logs, describe_records
from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import EnvironmentRaised, EnvSource, Verdict
from rollgym.env_server.workers.wire import (
    RAISED,
    READY,
    RESULT,
    FrameSplitter,
    dump_result,
    frame,
    load_request,
)

_READ_SIZE = 256 * 1024


class ChildEnvironments:
    """The environments of one child, by number, and its verifiers, by how they are built."""

    def __init__(self) -> None:
        self._environments: dict[int, boundary.Environment] = {}
        self._verifiers: dict[bytes, boundary.Environment] = {}
        self._about: dict[int | bytes, dict[str, str]] = {}
        self._running: int | bytes = -1
        self.operations: dict[str, Callable[..., Any]] = {
            "make": self.make,
            "reset": self.reset,
            "step": self.step,
            "render": self.render,
            "reseed": self.reseed,
            "close": self.close,
            "prepare": self.prepare,
            "score": self.score,
        }

    def about(self, session_id: str | None) -> dict[str, str]:
        """The subject of a log record: the session or the verifier of the running operation."""
        return self._about.get(self._running, {})

    def turn_to(self, what: int | bytes) -> None:
        """Record the target of the next operation: the number of an environment, or the source of a verifier."""
        self._running = what

    def make(
        self, number: int, session_id: str, source: EnvSource, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Build an environment; return its spaces as described on the wire."""
        self._about[number] = {"session_id": session_id, "env_id": source.env_id}
        environment = boundary.build(source, kwargs)
        try:
            action_space, observation_space = boundary.spaces(environment)
        except EnvironmentRaised:
            boundary.close(environment)
            raise
        self._environments[number] = environment
        return describe_space(action_space), describe_space(observation_space)

    def reset(self, number: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
        """Begin an episode in an environment."""
        return boundary.reset(self._environments[number], seed, options)

    def step(self, number: int, action: Any) -> tuple[Any, ...]:
        """Take a step in an environment."""
        observation, reward, terminated, truncated, info = boundary.step(self._environments[number], action)
        return observation, reward, terminated, truncated, info

    def render(self, number: int, mode: str | None) -> Any:
        """Render an environment's current state."""
        return boundary.render(self._environments[number], mode)

    def reseed(self, number: int, seed: int) -> None:
        """Set a new seed for an environment's random generator."""
        boundary.reseed(self._environments[number], seed)

    def close(self, number: int) -> None:
        """Let an environment go. It may never have been made: its maker gave up before it was, and did not know."""
        self._about.pop(number, None)
        environment = self._environments.pop(number, None)
        if environment is not None:
            boundary.close(environment)

    def prepare(self, source: bytes) -> None:
        """Build a verifier, so that no response's time is spent on that."""
        if source not in self._verifiers:
            loaded: EnvSource = load_request(source)
            self._about[source] = {"env_id": loaded.env_id}
            self._verifiers[source] = boundary.build(loaded, {})

    def score(self, source: bytes, items: Sequence[Mapping[str, Any]]) -> tuple[list[Verdict], float]:
        """Score responses, each by itself; return the verdicts and the seconds they took."""
        self.prepare(source)
        verifier = self._verifiers[source]
        began = time.perf_counter()
        verdicts = [_score(verifier, item) for item in items]
        return verdicts, time.perf_counter() - began

    def close_all(self) -> None:
        """Close all environments and drop them."""
        for environment in (*self._environments.values(), *self._verifiers.values()):
            boundary.close(environment)


def _score(verifier: boundary.Environment, item: Mapping[str, Any]) -> Verdict:
    try:
        verdict = boundary.score(verifier, item)
        if type(verdict["detail"]) is not str:
            # A verdict that cannot be encoded fails alone, without the others of its batch.
            boundary.guarded(dump_result, verdict["detail"])
        return verdict
    except EnvironmentRaised as error:
        boundary.report(error)
        return boundary.error_verdict(error)


def serve(connection: socket.socket, environments: ChildEnvironments) -> None:
    """Answer requests in order until the request to exit, or until the server has died."""
    reader = FrameSplitter()
    connection.sendall(frame(0, READY, b""))
    while data := connection.recv(_READ_SIZE):
        for number, _, body in reader.feed(data):
            op, arguments = load_request(body)
            if op == "exit":
                environments.close_all()
                return
            environments.turn_to(arguments[0])
            connection.sendall(_answer(number, environments.operations[op], arguments))


def _answer(number: int, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return frame(number, RESULT, boundary.guarded(_run, operation, arguments))
    except EnvironmentRaised as error:
        boundary.report(error)
        return frame(number, RAISED, dump_result((error.error_class, error.message, error.builtin_bases)))


def _run(operation: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    # Writing a result runs code of the environment's objects, and so belongs within the boundary, too.
    return dump_result(operation(*arguments))


def _end_with(connection: socket.socket) -> None:
    """End this process when the other side of the socket is gone, even if the main thread is busy."""
    hangup = select.poll()
    hangup.register(connection, select.POLLHUP)
    while not any(events & (select.POLLHUP | select.POLLERR) for _, events in hangup.poll()):
        pass
    os._exit(0)


def main(descriptor: int, log_format: LogFormat) -> None:
    """Run the child on its end of the socket pair."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    environments = ChildEnvironments()
    configure_logs("warning", log_format, f"worker-{os.getpid()}")
    describe_records(environments.about)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    # The modules imported so far live as long as the process; garbage collections need not scan them.
    gc.freeze()
    exit_code = 1
    try:
        serve(connection, environments)
        exit_code = 0
    except ConnectionError:
        # The server went away while it was being answered.
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        logging.shutdown()
        sys.stdout.flush()
        # Threads that an environment left behind must not keep the process alive.
        os._exit(exit_code)
