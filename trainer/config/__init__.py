"""The strict configuration of a run."""
