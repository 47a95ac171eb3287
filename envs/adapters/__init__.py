"""Adapters: environments of others, played as ours are."""
