"""System calls of Linux by ctypes, for which Python has no functions; `supervisor` and `local` enter."""
