"""Formats of tool calls: for each a reader and a writer, which are inverses; all pure."""
