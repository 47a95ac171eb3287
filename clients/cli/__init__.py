"""The `roll-env` command; nobody enters."""
