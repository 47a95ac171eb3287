"""One pass over weights that several servers are sent, each at its own pace."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor

Named = tuple[str, Tensor]


class SharedReading:
    """Reads weights once for all who read them at about the same time.

    Weights that ranks divide are gathered to be read, which costs as much for each pass. The newest of what was read is
    held, up to a bound. Nobody waits for anybody: who falls behind what is held goes on in a pass of its own.

    Args:
        read: Begins a pass; all of them give the same, in one order.
        limit: Bytes that are held at most, but for single tensors that are larger.
    """

    def __init__(self, read: Callable[[], Iterator[Named]], limit: int = 2**30) -> None:
        self._read = read
        self._limit = limit
        self._pass: Iterator[Named] | None = None
        self._held: deque[Named] = deque()
        self._first = 0
        self._bytes = 0
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def reader(self) -> Iterator[Named]:
        """Yield all weights."""
        place = 0
        while True:
            with self._lock:
                behind = place < self._first
                if not behind and place - self._first == len(self._held) and not self._advance():
                    return
                named = None if behind else self._held[place - self._first]
            if named is None:
                yield from islice(self._read(), place, None)
                return
            yield named
            place += 1

    def _advance(self) -> bool:
        """Read one tensor more; return whether there was one. The lock is held."""
        if self._pass is None:
            self._pass = self._read()
        if self._failure is not None:
            raise self._failure
        try:
            named = next(self._pass, None)
        except Exception as error:
            # A pass that broke off gives no more to the others either, and that is not its end.
            self._failure = error
            raise
        if named is None:
            return False
        self._held.append(named)
        self._bytes += _size(named)
        while self._bytes > self._limit and len(self._held) > 1:
            self._bytes -= _size(self._held.popleft())
            self._first += 1
        return True

    def drop(self) -> None:
        """Hold nothing any more: there are other weights."""
        with self._lock:
            self._first += len(self._held)
            self._held.clear()
            self._bytes, self._pass = 0, None


def _size(named: Named) -> int:
    return named[1].numel() * named[1].element_size()
