"""The version, for every module of ours: a tree that is not installed has it, too."""

__version__ = "0.1.0"
