"""Verifiers: stateless environments that score one response."""
