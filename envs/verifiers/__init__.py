"""Verifiers: stateless environments that score one response; users enter for what theirs are made of."""
