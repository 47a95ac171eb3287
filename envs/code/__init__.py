"""Environments in which programs are written: grader, items, turns around it; `tools` and `verifiers` enter."""
