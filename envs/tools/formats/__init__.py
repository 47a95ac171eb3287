"""Formats of tool calls: each a pure reader and writer."""
