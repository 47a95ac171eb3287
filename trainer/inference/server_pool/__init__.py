"""Several inference servers as one client; who makes clients enters."""
