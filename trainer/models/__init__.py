"""Models and tokenizers: load them, or build the tiny policy; from `backends` and `inference` up all enter."""
