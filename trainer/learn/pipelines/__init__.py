"""Training loops that read as the algorithm."""
