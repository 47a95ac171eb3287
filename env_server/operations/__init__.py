"""All that a client can ask of a server, and the parts that answer it; transports and `process` enter."""
