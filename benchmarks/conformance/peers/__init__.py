"""Recorders of other trainers' functions, and what of ours stands beside each."""
