"""A module of an author who is not done yet."""

raise RuntimeError("this module has a bad day")
