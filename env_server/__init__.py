"""Serves environments over HTTP and WebSocket."""
