"""The `roll-env` command."""
