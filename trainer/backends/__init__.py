"""Hold the trained model: log-probabilities, values, optimizer steps; from `cluster` and `learn` up all enter."""
