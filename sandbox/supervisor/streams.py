"""Output that is read to its end and kept up to a limit."""

import os

_CHUNK = 1 << 16


class CappedStream:
    """The reading end of a program's output: all is read, so that the program never waits, and the beginning is kept.

    Args:
        descriptor: The reading end, which this object closes.
        keep: How many bytes are kept.
    """

    def __init__(self, descriptor: int, keep: int) -> None:
        self.descriptor = descriptor
        self.kept = bytearray()
        self.total = 0
        self.open = True
        self._keep = keep
        os.set_blocking(descriptor, False)

    @property
    def truncated(self) -> bool:
        """Whether output beyond the limit was dropped."""
        return self.total > len(self.kept)

    def read_some(self) -> bool:
        """Read the available bytes once; False if there is nothing now, or the end was reached."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self.total += len(data)
        room = self._keep - len(self.kept)
        if room > 0:
            self.kept += data[:room]
        return True

    def drain(self, most: int) -> None:
        """Read the available bytes, up to this total since the start."""
        while self.open and self.total < most and self.read_some():
            pass

    def close(self) -> None:
        """Close the descriptor of the stream."""
        if self.open:
            self.open = False
            os.close(self.descriptor)


class Feed:
    """The writing end of a program's input.

    Args:
        descriptor: The writing end, which this object closes.
        data: The program's input.
    """

    def __init__(self, descriptor: int, data: bytes) -> None:
        self.descriptor = descriptor
        self.open = True
        self._rest = memoryview(data)
        os.set_blocking(descriptor, False)

    def write_some(self) -> None:
        """Write as much as fits; close at the end, or when the reader has closed its side."""
        try:
            if self._rest:
                self._rest = self._rest[os.write(self.descriptor, self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.close()
            return
        if not self._rest:
            self.close()

    def close(self) -> None:
        """Close the descriptor of the stream."""
        if self.open:
            self.open = False
            os.close(self.descriptor)
