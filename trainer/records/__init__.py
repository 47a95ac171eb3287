"""What a run leaves behind: trajectories, the ledger of tasks, checkpoints; from `models` up all enter."""
