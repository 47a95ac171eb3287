"""Talk to environments over the wire: client, Gymnasium faces, protocol."""
