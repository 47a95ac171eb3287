"""The `roll-env` command; no other package imports it."""
