"""Interpreters that wait in sandboxes and fork for each run of Python; `rollgym.WarmPool` is the way in."""
