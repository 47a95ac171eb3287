"""What a run leaves behind: trajectories, the ledger of tasks, checkpoints."""
