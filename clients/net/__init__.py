"""The way to a server: WebSockets, a pool of them, calls that outlive a broken one; for `client` and for gateways."""
