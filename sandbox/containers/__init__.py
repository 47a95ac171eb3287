"""Warm containers, each with a process of ours in it that runs one program after another."""
