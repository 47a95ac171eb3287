"""Environments in which programs are written: the grader, its items, and the turns around it."""
