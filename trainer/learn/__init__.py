"""Training batches and their updates."""
