"""Environments of a server in TRL, GEM and ROLL, verl, and Inspect AI. Each module imports its library late."""
