"""Writes new folders from templates; entered by `roll-env init` (a package) and `roll-train init` (a run)."""
