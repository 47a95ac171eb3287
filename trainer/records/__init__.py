"""Records of a run: trajectories, the ledger of tasks, checkpoints; from `models` up all enter."""
