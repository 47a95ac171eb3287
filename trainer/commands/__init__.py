"""The commands of `roll-train`: train, play episodes, evaluate; the command line enters, and `rollgym.train`."""
