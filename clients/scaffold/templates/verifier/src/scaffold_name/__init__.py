"""ScaffoldName-v0: questions whose answers are checked."""

from .environment import ScaffoldObject

__all__ = ["ScaffoldObject"]
