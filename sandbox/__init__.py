"""Runs untrusted programs under limits. Imports nothing of the other floors."""
