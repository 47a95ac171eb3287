"""Adapters: third-party environments, played like the built-in ones; servers enter for `TextAdapter`."""
