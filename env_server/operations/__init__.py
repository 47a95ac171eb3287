"""All that a client can ask of a server, and the parts that answer it; the transports enter, nothing below."""
