"""Bring new weights to the inference engines."""
