"""Training batches and their updates; from `assembly` up all enter."""
