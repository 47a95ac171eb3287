"""The child process of a `ProcessPool`: imports one function and calls it, call after call."""

import importlib
import json
import os
import resource
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int, target: str, memory_bytes: int) -> None:
    """Answer calls until the other side is gone."""
    os.set_inheritable(descriptor, False)
    # Ctrl-C is for the parent, whose end this process follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        connection.send_bytes(b'["ready", null]')
        while True:
            connection.send_bytes(_answer(function, json.loads(connection.recv_bytes())))
    except (EOFError, ConnectionError):
        # The parent closed its end: an answer would have no reader.
        os._exit(0)


def _answer(function: Callable[[Any], Any], argument: Any) -> bytes:
    try:
        answer = "result", function(argument)
        return json.dumps(answer).encode()
    except Exception as error:  # noqa: BLE001 - the boundary to other projects' code: what it raises is an answer
        return json.dumps(("raised", f"{type(error).__name__}: {str(error)[:200]}")).encode()


def _end_with(descriptor: int) -> None:
    """End this process when the other side is gone, whatever the main thread does."""
    hangup = select.poll()
    hangup.register(descriptor, select.POLLHUP)
    while not any(events & (select.POLLHUP | select.POLLERR) for _, events in hangup.poll()):
        pass
    os._exit(0)
