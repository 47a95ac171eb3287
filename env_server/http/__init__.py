"""HTTP and the WebSocket of our own protocol, from bytes to operations; `protocols` and `process` enter."""
