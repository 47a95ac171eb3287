"""Environments that a program drops without closing: their connections are closed all the same, with a warning."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from rollgym.clients.process.background import BackgroundLoop

_AT_EXIT_S = 2.0


def close_when_dropped(
    owner: object,
    name: str,
    background: BackgroundLoop,
    closing: Callable[[], Coroutine[Any, Any, None]],
) -> weakref.finalize[Any, Any]:
    """Close a connection once its owner is garbage-collected, or when the program ends; `detach` cancels that.

    Args:
        owner: The object that should have closed it.
        name: Its name in the warning.
        background: The loop that it belongs to, which then ends.
        closing: Closes it; it must not hold the owner.
    """
    return weakref.finalize(owner, _close, name, background, closing, os.getpid())


def _close(
    name: str, background: BackgroundLoop, closing: Callable[[], Coroutine[Any, Any, None]], pid: int
) -> None:
    if os.getpid() != pid:
        # A fork has the connection of the process that made it, and no thread for it.
        return
    background.end_with(closing)
    if not threading.main_thread().is_alive():
        # The program ends, and its threads with it; at any other time the caller does not wait for the close.
        background.join(_AT_EXIT_S)
    warnings.warn(f"unclosed {name}", ResourceWarning, stacklevel=2)
