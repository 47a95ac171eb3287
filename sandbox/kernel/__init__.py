"""What the Linux kernel is asked for by ctypes, as Python has no functions for it; `supervisor` and `local` enter."""
