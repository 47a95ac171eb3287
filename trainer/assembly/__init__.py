"""Builds the parts of a run from its settings; `evaluation` and `commands` enter."""
