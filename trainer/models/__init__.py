"""Models and tokenizers: load them, or build the tiny policy."""
