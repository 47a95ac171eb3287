"""A server that notes how much CPU its event loop takes in one turn: python turn_meter.py FILE ARGUMENT...

FILE holds two numbers: the longest turn in seconds of the loop's own CPU, and how many turns there were. Whoever reads
it may write zeros, to begin anew. The rest are arguments of `rollgym.env_server`. The loop never sleeps here.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

import uvloop

from rollgym.env_server import cli

NOTED = struct.Struct("dd")


class MeteredLoop(uvloop.Loop):
    """A loop that notes its longest turn.

    Args:
        noted: Where.
    """

    def __init__(self, noted: mmap.mmap) -> None:
        super().__init__()
        self._noted = noted
        self._last = 0.0

    def run_forever(self) -> None:
        self._last = time.thread_time()
        self.call_soon(self._tick)
        super().run_forever()

    def _tick(self) -> None:
        now = time.thread_time()
        longest, turns = NOTED.unpack_from(self._noted)
        NOTED.pack_into(self._noted, 0, max(longest, now - self._last), turns + 1)
        self._last = time.thread_time()
        if self.is_running():
            self.call_soon(self._tick)


def main() -> None:
    with Path(sys.argv[1]).open("r+b") as file:
        noted = mmap.mmap(file.fileno(), NOTED.size)
    uvloop.new_event_loop = lambda: MeteredLoop(noted)
    sys.exit(cli.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
