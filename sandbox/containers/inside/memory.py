"""Who may look into the memory of a process, and use its descriptors."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def close_memory(closed: bool) -> None:
    """Close the memory of this process to others of its user, or open it.

    Raises:
        OSError: If the kernel refuses.
    """
    arguments = [ctypes.c_ulong(int(not closed)), *[ctypes.c_ulong(0)] * 3]
    if _libc.prctl(ctypes.c_int(_PR_SET_DUMPABLE), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "who may read this memory cannot be set")
