"""Training batches and their updates; `evaluation` and `run` enter."""
