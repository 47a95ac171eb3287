"""Interpreters that wait in sandboxes and fork for each run of Python; users enter by `rollgym.WarmPool`."""
