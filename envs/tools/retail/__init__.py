"""Retail-v0: a shop's customer service, played against a scripted customer."""
