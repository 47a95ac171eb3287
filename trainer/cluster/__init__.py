"""Placement of a run's roles, their start, and their restart after a death; `run` enters."""
