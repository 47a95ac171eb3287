"""The wire: messages, errors, spaces, values, frames, portable episodes; all may enter, and floors above as well."""
