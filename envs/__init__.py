"""Environments and verifiers: plain Gymnasium, no server."""
