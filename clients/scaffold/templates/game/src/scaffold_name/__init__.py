"""ScaffoldName-v0: a game, as an environment for language models."""

from .environment import ScaffoldObject

__all__ = ["ScaffoldObject"]
