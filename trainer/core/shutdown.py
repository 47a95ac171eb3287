"""How a command ends before its time: in order at the first Ctrl-C or SIGTERM, at once at the second."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

from rollgym.trainer.core.errors import RoleDiedError, TrainerError

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class InterruptedRunError(TrainerError):
    """A person or a supervisor ended the command.

    Attributes:
        exit_code: The shell's for this signal: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(
            "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        )
        self.exit_code = 128 + number


class GracefulShutdown:
    """Cancels a command on request, but never in the middle of work that must complete as a whole.

    Attributes:
        say: Called once, when the end is requested.
        reason: Why the command ends; None while it runs.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _print
        self.reason: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deferred = False
        self._signalled = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen to signals while the calling task is inside.

        A signal that is ignored (Ctrl-C in a background shell) stays ignored.

        Raises:
            Exception: The reason, in place of the cancellation that it caused.
        """
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        heeded = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():
            heeded = []  # Python hands signals to its main thread only
        for number in heeded:
            signal.signal(number, self._on_signal)
        try:
            yield
        except asyncio.CancelledError:
            if self.reason is None:
                raise
            raise self.reason from None
        finally:
            for number in heeded:
                signal.signal(number, before[number])

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Put the end off while inside: what is done here is done as a whole."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.reason is not None and self._task is not None:
            self._task.cancel()

    def end(self, reason: Exception) -> None:
        """End the command, for the first reason given; a person's reason overrides a recoverable death."""
        mendable = isinstance(self.reason, RoleDiedError) and isinstance(reason, InterruptedRunError)
        if self.reason is not None and not mendable:
            return
        self.reason = reason
        if self._task is not None and not self._deferred:
            self._task.cancel()

    async def cancel_shutdown(self) -> bool:
        """Let the command continue if the reason of its end was a role's death, from which it can recover.

        Returns:
            Whether it continues; not if a person has interrupted it meanwhile.
        """
        if self.reason is not None and not isinstance(self.reason, RoleDiedError):
            return False
        if self.reason is not None and self._task is not None:
            self._task.uncancel()
        self.reason = None
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # a cancellation that was asked for and has not come yet
        return self.reason is None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled or self._loop is None:
            _die(number)
        self._signalled = True
        self._loop.call_soon_threadsafe(self._end_in_order, number)

    def _end_in_order(self, number: int) -> None:
        doing = "after this step" if self._deferred else "now"
        self.say(f"{InterruptedRunError(number)}: ending in order {doing}; a second Ctrl-C ends at once")
        self.end(InterruptedRunError(number))


async def run_shielded(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of what must not be left half done; a cancellation that comes meanwhile comes afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


def _die(number: int) -> NoReturn:
    """End this process by the signal itself, as without a handler."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())  # a live table hides it
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # if the signal is blocked


def _print(text: str) -> None:
    sys.stderr.write(f"roll-train: {text}\n")
    sys.stderr.flush()
