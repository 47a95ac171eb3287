"""The way to a server: WebSockets, a pool of them, calls that outlive one; `client`, commands and gateways enter."""
