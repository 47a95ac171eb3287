"""Hold the trained model: log-probabilities, values, optimizer steps."""
