"""Measures policies on fixed sets of tasks, collects demonstrations, and draws runs; `run` enters."""
