"""Warm containers of a Docker Engine: a process in each runs one program after another; `selection` enters."""
