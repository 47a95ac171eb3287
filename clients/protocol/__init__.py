"""The wire: messages, errors, spaces, values, frames, portable episodes."""
