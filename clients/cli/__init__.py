"""The `roll-env` command. Nobody enters but other commands, which share its `--version`."""
