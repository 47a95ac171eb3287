"""What `roll-train` does: train, play episodes, evaluate; the command line enters, and `rollgym.train`."""
