"""Kinds of inference servers: what is said to each, without I/O, and how they are started; `server_client` enters."""
