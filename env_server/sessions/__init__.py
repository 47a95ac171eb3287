"""The sessions of one I/O process: who has them, what they answer, when they end."""
