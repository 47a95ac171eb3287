"""HTTP and the WebSocket of our own protocol: frames and bodies in, operations called, answers out."""
