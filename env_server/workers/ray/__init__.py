"""Environments in actors of a Ray cluster; imported where `workers: ray` asks for it, and nowhere else."""
