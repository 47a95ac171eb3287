"""The `roll-env` command; no other room enters."""
