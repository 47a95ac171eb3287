"""Measures policies on fixed sets of tasks, and collects demonstrations; `commands` enters."""
