"""Imports the modules of all built-in environments, as a server does when it starts."""

from importlib import import_module

from rollgym.envs.registry import builtin_environments

for _spec in builtin_environments().values():
    import_module(_spec.entry_point.partition(":")[0])
