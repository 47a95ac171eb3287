"""What `roll-train` does: train, play episodes, evaluate."""
