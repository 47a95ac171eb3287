"""The environments that a server has, and what a client may ask of each; every room from `sessions` up enters."""
