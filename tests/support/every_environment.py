"""Imports the modules of all built-in environments, as a server does when it starts."""

from rollgym.envs.registry import builtin_environments

for _environment in builtin_environments().values():
    _environment.load()
