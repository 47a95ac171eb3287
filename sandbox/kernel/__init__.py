"""What the Linux kernel is asked for directly, by ctypes: Python has no functions of its own for it."""
