"""Warm containers of a Docker Engine, a process of ours in each, for one program after another; `selection` enters."""
