"""Environments in actors of a Ray cluster; imported only with `workers: ray`."""
