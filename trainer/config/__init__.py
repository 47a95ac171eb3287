"""The strict configuration of a run; from `tasks` up all enter."""
