"""Adapters: environments of others, played as ours are; servers enter for `TextAdapter`."""
