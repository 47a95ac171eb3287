"""Tools that a policy calls by name: declaring them, reading calls in all common formats, and environments of them."""
